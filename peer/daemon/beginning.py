"""Where the first state of a peer comes from: slow weights, outer momentum, and where they stand.

    Fresh      the model's initialisation: nobody holds this part of the model yet
    Fetched    a peer of the group, which trains on meanwhile
    Rebuilt    the stages before and after ours, which all others have left (rebuilding.py)

A beginning fills both vectors and returns a `FirstState`; what becomes of it is the same for all.
Which one a peer has is said by its provision (provision.py). Another beginning is another class.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median_high
from typing import Final, Protocol

import trio

from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.ports import PeerId
from peer.state.held_part import HeldPart
from peer.state.service import Fetcher
from peer.state.state_file import StateScalars
from peer.training.ports import Float32Vector
from protocol.errors import InvalidRunSpec
from protocol.membership.view import Roster, View
from protocol.run.run_spec import RunSpec
from protocol.schedule.data_plan import start_position
from protocol.schedule.rounds import oldest_useful

from .sources import Sources


@dataclass(frozen=True, slots=True)
class FirstState:
    """Where the state stands that a peer begins with.

    Attributes:
        round: of the last outer step in it; -1 before the first.
        step: the nominal step.
        epoch, position: where the data stands (protocol/schedule/data_plan.py).
    """

    round: int
    step: int
    epoch: int
    position: int


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
    """

    spec: RunSpec
    held: HeldPart
    slow_P: Float32Vector
    momentum_P: Float32Vector
    facts: Facts
    events: EventLog
    sources: Sources
    roster: Roster
    look_around: Callable[[], Awaitable[None]]


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

    def __repr__(self) -> str:
        return "<Fresh>"

    async def take(self, arrival: Arrival) -> FirstState:
        """Write the first weights."""
        arrival.facts.now_doing("taking the first weights")
        await self._initialise(arrival.slow_P)
        return NOTHING_TRAINED


class Fetched:
    """The state of a peer of the group."""

    ages = True

    def __repr__(self) -> str:
        return "<Fetched>"

    async def take(self, arrival: Arrival) -> FirstState:
        """Fetch it, verified; what only its source says of the schedule moves nothing."""
        started_s, held, source = trio.current_time(), arrival.held, list[PeerId]()
        arrival.facts.now_doing("fetching the state")

        async def ask(fetcher: Fetcher) -> StateScalars:
            source.append(fetcher.remote_peer_id)
            return await fetcher.state(
                held.group.digest,
                arrival.slow_P,
                arrival.momentum_P,
                lambda share: arrival.facts.now_doing(f"fetching the state: {share:.0%}"),
                minimum_step=_oldest_useful_step(arrival.spec, held.view),
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(arrival.look_around)  # a helper need not hold it
            state = await arrival.sources.fetch(ask, held.view)
            nursery.cancel_scope.cancel()
        if state.layout_digest != held.shape.layout_digest:
            raise InvalidRunSpec("the swarm's model has another layout than ours")
        arrival.events.emit(
            EventName.STATE_RECEIVED,
            round=state.round,
            remotes=source[-1:],
            bytes=8 * held.shape.padded_parameters,
            seconds=trio.current_time() - started_s,
        )
        epoch, position = _position(state, held.view)
        return FirstState(state.round, _step(state, arrival.spec, held.view), epoch, position)


def _heard_steps(spec: RunSpec, view: View) -> list[int]:
    """Nominal steps of those that train and are not past the end."""
    last = spec.total_rounds * spec.sync.inner_steps
    heard = (m.progress.step for m in view.members_training(trio.current_time()))
    return [step for step in heard if step <= last]


def _oldest_useful_step(spec: RunSpec, view: View) -> int:
    """The oldest step that is of use beside those that train."""
    return oldest_useful(_heard_steps(spec, view), spec.sync.inner_steps)


def _step(state: StateScalars, spec: RunSpec, view: View) -> int:
    """The state's nominal step, no further than the middle of the others.

    While none of them is heard it is 0; where the others are is gone to when they are.
    """
    return min(state.step, median_high(_heard_steps(spec, view) or [0]))


def _position(state: StateScalars, view: View) -> tuple[int, int]:
    """The epoch and position of data to begin at."""
    heard = [
        (m.progress.epoch, m.progress.position) for m in view.members_training(trio.current_time())
    ]
    # A peer that has said no more than hello has told no position; the state knows one.
    known = [position for position in heard if position != (0, 0)]
    return start_position([*known, (state.epoch, state.position)])
