"""Where the first state of a peer comes from: slow weights, outer momentum, and where they stand.

    Fresh      the model's initialisation: nobody holds this part of the model yet
    Fetched    one peer of the group, or several, which train on meanwhile
    Rebuilt    the stages before and after ours, which all others have left (rebuilding.py)

A beginning fills both vectors and returns a `FirstState`; what becomes of it is the same for all.
Which one a peer has is said by its provision (provision.py). Another beginning is another class.

A state fetched from the peer that leads, and from some that help it, until it is believed.

    fragments    all hold the same: helpers give the bytes that most name, and the leader's root is
                 what is compared
    pairs        each gives chunks of its own replica, is compared by what it gave, and is left out
                 where that is odd (comparison.py); what it gave then comes from the others

In pairs nobody helps where it could not be found out: two witnesses of its state have to have
answered. A small state is not shared, for each helper writes a file.

How far a state has come that is being fetched: for `status`, and for the event log.
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from statistics import median_high
from typing import Final, Protocol

import trio

from peer.content.fetching import ExpectedState, Fetcher
from peer.content.gathering import CHUNKS_PER_SOURCE, Gathering
from peer.content.state_file import StateManifest, StateScalars
from peer.daemon.comparison import MeasureLoss, Witnesses
from peer.facts import Facts, HeldPart, PeerState
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.ports import PeerId
from peer.training.ports import Float32Vector
from protocol.content.samples import LEAST_WITNESSES
from protocol.errors import RemoteProtocolError
from protocol.membership.heeded import heeded
from protocol.membership.view import Roster, View
from protocol.run.amendments import AmendedSpec
from protocol.schedule.data_plan import start_position
from protocol.schedule.rounds import lost_lag, middle, oldest_useful

from .checkpointing import GoOn
from .comparison import Comparison
from .sources import Sources

# --- fetch progress -------------------------------------------------------------------------------

TELL_EVERY_S: Final = 10.0


class FetchProgress:
    """Follows one gathering, from its making on."""

    def __init__(self, gathering: Gathering, facts: Facts, events: EventLog) -> None:
        self._gathering = gathering
        self._facts = facts
        self._events = events
        self._began_s = self._told_s = trio.current_time()

    def moved(self) -> None:
        """A chunk came: say how far it is, and how long the rest will take at this pace."""
        gathering, now_s = self._gathering, trio.current_time()
        sources, elapsed_s = gathering.num_sources, now_s - self._began_s
        left_s = gathering.missing_bytes / max(1, gathering.fetched_bytes) * elapsed_s
        peers = "1 peer" if sources == 1 else f"{sources} peers"
        self._facts.now_doing(
            f"fetching the state: {gathering.share:.0%} from {peers}, {left_s:.0f} s left"
        )
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            self._events.emit(
                EventName.STATE_PROGRESSED,
                share=round(gathering.share, 4),
                remotes=gathering.remotes,
                bytes=gathering.fetched_bytes,
                left_s=round(left_s, 1),
            )

    def ended(self, round_: int) -> None:
        """All of it is here, and is believed."""
        gathering = self._gathering
        self._events.emit(
            EventName.STATE_RECEIVED,
            round=round_,
            remotes=gathering.remotes,
            bytes=gathering.fetched_bytes,
            kept_bytes=gathering.kept_bytes,
            seconds=trio.current_time() - self._began_s,
        )


# --- beginning ------------------------------------------------------------------------------------

# --- shared fetch ---------------------------------------------------------------------------------

MAX_HELPERS: Final = 3
"""Further peers that a state is taken from at once."""
MAX_DOUBTED: Final = 3
"""After so many odd sources one at a time is taken: whoever has many identities gains no more."""


class SharedFetch:
    """Fetches a state from a leader and helpers until it is believed.

    Args:
        described_by: what a source's state is made of, checked as far as that goes.
        moved: called when a chunk has come.
        nursery: others help in it.
        mixes: of replicas that differ.
    """

    def __init__(
        self,
        gathering: Gathering,
        comparison: Comparison,
        sources: Sources,
        view: View,
        described_by: Callable[[Fetcher], Awaitable[StateManifest]],
        moved: Callable[[], None],
        nursery: trio.Nursery,
        *,
        mixes: bool,
    ) -> None:
        self._gathering = gathering
        self._comparison = comparison
        self._sources = sources
        self._view = view
        self._described_by = described_by
        self._moved = moved
        self._nursery = nursery
        self._mixes = mixes
        self._doubted: set[PeerId] = set()
        self._alone = False

    async def lead(self, fetcher: Fetcher) -> StateScalars:
        """Fetch a state that this source leads, and compare it.

        Raises:
            StreamLost, Refused, RemoteProtocolError: this source failed; another one may lead.
        """
        leader = fetcher.remote_peer_id
        described = await self._described_by(fetcher)
        self._comparison.keep(self._gathering.remotes)
        self._comparison.ask_about(leader, described.root.hex())
        while True:
            state = await self._gather(fetcher, described)
            odd = await self._drop_odd_ones()
            if leader in odd:
                raise RemoteProtocolError(f"what {leader} gave is unlike what others have")
            if not odd:
                break
        try:
            await self._comparison.check_whole(leader)
        except RemoteProtocolError:
            self._gathering.forget()
            self._alone = self._mixes
            raise
        return state

    async def _gather(self, fetcher: Fetcher, described: StateManifest) -> StateScalars:
        helping = trio.CancelScope()
        if self._may_be_helped(described):
            self._nursery.start_soon(self._be_helped, helping, fetcher.remote_peer_id)
        try:
            return await self._gathering.lead(fetcher, described, self._moved)
        finally:
            helping.cancel()

    async def _be_helped(self, until: trio.CancelScope, leader: PeerId) -> None:
        with until:
            apart_from = {leader, *self._doubted}
            await self._sources.help_with(self._help, self._view, apart_from, MAX_HELPERS)

    def _may_be_helped(self, described: StateManifest) -> bool:
        if not self._mixes:
            return True
        training = self._view.members_training(trio.current_time())
        return (
            not self._alone
            and len(self._doubted) < MAX_DOUBTED
            and len(training) > LEAST_WITNESSES
            and len(described.digests) > CHUNKS_PER_SOURCE
        )

    async def _help(self, fetcher: Fetcher) -> bool:
        """Take a part from this source, if it could be found out; whether it could."""
        described = await self._described_by(fetcher)
        if not self._gathering.is_of_one_time(described):
            return False
        name = fetcher.remote_peer_id
        try:
            if self._mixes:
                self._comparison.ask_about(name, described.root.hex())
                if not await self._comparison.is_seen(name):
                    return False
            await self._gathering.help(fetcher, described, self._moved)
        finally:
            if name not in self._gathering.remotes:
                self._comparison.forget(name)
        return True

    async def _drop_odd_ones(self) -> list[PeerId]:
        """Drop what odd sources gave; name them."""
        if not self._mixes:
            return []
        gathering = self._gathering
        odd = await self._comparison.odd_ones(gathering.remotes, gathering.gave)
        for source in odd:
            gathering.distrust(source)
        self._doubted.update(odd)
        return odd


# --- beginning ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FirstState:
    """Where the state stands that a peer begins with.

    Attributes:
        round: of the last outer step in it; -1 before the first.
        step: the nominal step.
        epoch, position: where the data stands (protocol/schedule/data_plan.py).
        debt: of our rounds (protocol/schedule/rounds.py).
        over: the run was over.
        go_on: what the trainer goes on from; None begins with the slow weights alone.
    """

    round: int
    step: float
    epoch: int
    position: int
    debt: float = 0.0
    over: bool = False
    go_on: GoOn | None = None


NOTHING_TRAINED: Final = FirstState(round=-1, step=0, epoch=0, position=0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a beginning fills, and what it may ask.

    Attributes:
        held: what belongs to our group.
        slow_P, momentum_P: zeros, to be filled.
        sources: the peers that may have a state.
        roster: all peers of the run; `held.view` knows those of our group.
        look_around: looks for peers of our group until cancelled.
        meet: the same, and lets them find us.
        witnesses_of: those of the state that this source has given this root.
        measure: the loss of what lies in `slow_P`.
    """

    spec: AmendedSpec
    held: HeldPart
    slow_P: Float32Vector
    momentum_P: Float32Vector
    facts: Facts
    events: EventLog
    sources: Sources
    roster: Roster
    look_around: Callable[[], Awaitable[None]]
    meet: Callable[[], Awaitable[None]]
    witnesses_of: Callable[[PeerId, str], Witnesses]
    measure: MeasureLoss


class Beginning(Protocol):
    """One source of first states."""

    @property
    def ages(self) -> bool:
        """Whether the state grows old while a trainer starts, and so is better taken after that."""

    async def take(self, arrival: Arrival) -> FirstState:
        """Fill the vectors; meanwhile, say in status and events what goes on.

        Raises:
            Refused: everybody refuses for good.
            InvalidRunSpec: the state cannot be used here.
        """


class Fresh:
    """The model's initialisation, without momentum.

    Args:
        initialise: writes the first slow weights.
    """

    ages = False

    def __init__(self, initialise: Callable[[Float32Vector], Awaitable[None]]) -> None:
        self._initialise = initialise

    async def take(self, arrival: Arrival) -> FirstState:
        """Write the first weights."""
        arrival.facts.now_doing("taking the first weights")
        await self._initialise(arrival.slow_P)
        return NOTHING_TRAINED


class Fetched:
    """The state of a peer of the group, or of several (shared_fetch.py).

    Args:
        own: digests of the chunks of a checkpoint of ours that the vectors hold already.
        patience_s: how long peers are asked.
    """

    ages = True

    def __init__(
        self, own: Mapping[int, bytes] | None = None, *, patience_s: float = math.inf
    ) -> None:
        self._own = own
        self._patience_s = patience_s

    async def take(self, arrival: Arrival) -> FirstState:
        """Fetch it, verified; what only its source says of the schedule moves nothing.

        Raises:
            NobodyHelped: nobody gave one that is right; both vectors may be half written.
        """
        held, view = arrival.held, arrival.held.view
        arrival.facts.now_doing("fetching the state")
        mixes = arrival.spec.founding.sync.diloco is None
        lag = lost_lag(arrival.spec.founding.sync.round_steps)
        gathering = Gathering(
            arrival.slow_P, arrival.momentum_P, self._own, mixes=mixes, lost_lag=lag
        )
        progress = FetchProgress(gathering, arrival.facts, arrival.events)

        async def described_by(fetcher: Fetcher) -> StateManifest:
            expected = ExpectedState(
                held.group.digest,
                minimum_step=_oldest_useful_step(arrival.spec, view),
                maximum_step=_newest_likely_step(arrival.spec, view),
                layout_digest=held.shape.layout_digest,
            )
            return await fetcher.description(expected, arrival.slow_P.size)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(arrival.look_around)  # a helper need not hold it
            comparison = Comparison(arrival.witnesses_of, arrival.slow_P, arrival.measure, nursery)
            fetch = SharedFetch(
                gathering,
                comparison,
                arrival.sources,
                view,
                described_by,
                progress.moved,
                nursery,
                mixes=mixes,
            )
            state = await arrival.sources.fetch(fetch.lead, view, patience_s=self._patience_s)
            nursery.cancel_scope.cancel()
        progress.ended(state.round)
        epoch, position = _position(state, view)
        step = _step(state, arrival.spec, view)
        over = _is_over(step, arrival.spec, view)
        return FirstState(state.round, step, epoch, position, over=over)


def _heard_steps(spec: AmendedSpec, view: View) -> list[int]:
    """Nominal steps of those that train, or have, and are not past the end.

    Those that are paused count where there are no others: they stand somewhere in the past.
    """
    there = (PeerState.TRAINING, PeerState.FINISHED)
    now_s = trio.current_time()
    members = [m for m in view.alive(now_s) if m.progress.step <= spec.longest_steps]
    resting = [m for m in members if m.progress.state == PeerState.PAUSED]
    ready = [m for m in members if m.progress.state in there]
    return [m.progress.step for m in heeded(ready or resting, now_s)]


def _oldest_useful_step(spec: AmendedSpec, view: View) -> int:
    """The oldest step that is of use beside those that train."""
    return oldest_useful(_heard_steps(spec, view), spec.founding.sync.round_steps)


def _newest_likely_step(spec: AmendedSpec, view: View) -> int | None:
    """The highest step that a state can honestly be of; None while nobody is heard."""
    heard = _heard_steps(spec, view)
    return median_high(heard) + lost_lag(spec.founding.sync.round_steps) if heard else None


def _step(state: StateScalars, spec: AmendedSpec, view: View) -> int:
    """The state's nominal step, no further than the middle of the others.

    While none of them is heard it is 0; where the others are is gone to when they are.
    """
    return min(state.step, int(middle(_heard_steps(spec, view), 0)))


def _is_over(step: float, spec: AmendedSpec, view: View) -> bool:
    """Whether this is the state of a run that has ended: nobody trains, or averages, any more."""
    members = view.alive(trio.current_time())
    ended = [member.progress.state == PeerState.FINISHED for member in members]
    return step >= spec.total_steps_at(step) and bool(ended) and all(ended)


def _position(state: StateScalars, view: View) -> tuple[int, int]:
    """The epoch and position of data to begin at."""
    now_s = trio.current_time()
    members = heeded(view.members_training(now_s), now_s)
    heard = [(m.progress.epoch, m.progress.position) for m in members]
    # A peer that has said no more than hello has told no position; the state knows one.
    known = [position for position in heard if position != (0, 0)]
    return start_position([*known, (state.epoch, state.position)])
