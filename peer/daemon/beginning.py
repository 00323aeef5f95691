"""Where the first state of a peer comes from: slow weights, outer momentum, and where they stand.

    Fresh      the model's initialisation: nobody holds this part of the model yet
    FromPeers  one peer of the group, or several, which train on meanwhile (fetched.py)
    Rebuilt    the stages before and after ours, which all others have left (provision.py)
    Returned   others that train, or our own checkpoint (returning.py)

A beginning fills both vectors and returns a `FirstState`. The provision (provision.py) says which
beginning a peer has.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from peer.facts import HeldPart
from protocol.content.samples import Float32Vector
from protocol.run.amendments import AmendedSpec
from protocol.schedule.data_plan import DataPlan

from .services import DaemonServices
from .sources import Sources

MeasureLoss = Callable[[], Awaitable[float | None]]
"""Measures the slow weights as they lie there; None where nobody can tell."""


async def cannot_tell() -> None:
    """There is no trainer yet, or it holds a stage and has no loss of its own."""


@dataclass(frozen=True, slots=True)
class FirstState:
    """The position of a peer's first state.

    Attributes:
        round: of the last outer step in it; -1 before the first.
        epoch, position: where the data stands (protocol/schedule/data_plan.py).
        debt: of our rounds (protocol/schedule/rounds.py).
        over: the run was over.
        go_on: what the trainer had kept beside it; None begins with the slow weights alone.
    """

    round: int
    step: float
    epoch: int
    position: int
    debt: float = 0.0
    over: bool = False
    go_on: Path | None = None


NOTHING_TRAINED: Final = FirstState(round=-1, step=0, epoch=0, position=0)


@dataclass(frozen=True, slots=True)
class StartContext:
    """The vectors that a beginning fills, and the parts of the peer that it may ask.

    Attributes:
        held: what belongs to our group.
        plan: of the data; where others say that they stand is held against it.
        slow_P, momentum_P: zeros, to be filled.
        look_around: looks for peers of our group until cancelled.
        meet: looks for them too, and lets them find us.
        measure: the loss of what lies in `slow_P`.
    """

    spec: AmendedSpec
    held: HeldPart
    plan: DataPlan
    slow_P: Float32Vector
    momentum_P: Float32Vector
    services: DaemonServices
    sources: Sources
    look_around: Callable[[], Awaitable[None]]
    meet: Callable[[], Awaitable[None]]
    measure: MeasureLoss


class Beginning(Protocol):
    @property
    def goes_stale(self) -> bool:
        """Whether the state grows old while a trainer starts, and so is better taken after that."""

    async def take(self, context: StartContext) -> FirstState:
        """Fill the vectors, and say in status and events what goes on.

        Raises:
            Refused: everybody refuses for good.
            InvalidRunSpec: the state cannot be used here.
        """


@dataclass(frozen=True)
class Fresh:
    """The model's initialisation, without momentum; `initialise` writes it."""

    goes_stale = False
    initialise: Callable[[Float32Vector], Awaitable[None]]

    async def take(self, context: StartContext) -> FirstState:
        context.services.facts.now_doing("taking the first weights")
        await self.initialise(context.slow_P)
        return NOTHING_TRAINED
