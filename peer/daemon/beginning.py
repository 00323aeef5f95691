"""Where the first state of a peer comes from: slow weights, outer momentum, and where they stand.

    Fresh      the model's initialisation: nobody holds this part of the model yet
    Fetched    one peer of the group, or several, which train on meanwhile
    Rebuilt    the stages before and after ours, which all others have left (rebuilding.py)

A beginning fills both vectors and returns a `FirstState`; what becomes of it is the same for all.
Which one a peer has is said by its provision (provision.py). Another beginning is another class.
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from statistics import median_high
from typing import Final, Protocol

import trio

from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.observe.status import PeerState
from peer.ports import PeerId
from peer.state.fetching import ExpectedState, Fetcher
from peer.state.gathering import Gathering
from peer.state.held_part import HeldPart
from peer.state.state_file import StateManifest, StateScalars
from peer.training.ports import Float32Vector
from protocol.membership.heeded import heeded
from protocol.membership.view import Roster, View
from protocol.run.amendments import AmendedSpec
from protocol.schedule.data_plan import start_position
from protocol.schedule.rounds import lost_lag, middle, oldest_useful

from .checkpointing import GoOn
from .comparison import Comparison
from .fetch_progress import FetchProgress
from .shared_fetch import SharedFetch
from .sources import Sources
from .witnesses import MeasureLoss, Witnesses


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
