"""The Trainer port: the inner loop as the daemon sees it.

Implementations: `process.py` (a child process) and `simulation/trainer.py` (a toy model in
virtual time).
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from peer.runtime.child_frames import ChildDied
from protocol.content.samples import Float32Vector
from protocol.errors import Unusable

from .messages import TrainerCommand, TrainerEvent

if TYPE_CHECKING:  # it imports torch, for seconds, and a command looks at its usage before
    from .shared import BoundaryRing


class CannotTrain(Unusable):
    """Device, corpus or model cannot be used on this machine, and a new try changes nothing."""


class NonFinite(Exception):
    """A loss, a gradient or a weight is NaN or infinite; the message says which and where."""


class WrongCommand(Exception):
    """A command that does not fit the trainer's state; the message says why."""


class Interrupted(Exception):
    """The daemon wants the trainer to stop, in the middle of a step."""


class TrainerDied(ChildDied): ...


class Trainer(Protocol):
    """One life of one trainer. Codes are views of memory, valid until they are written again."""

    @property
    def boundaries(self) -> "BoundaryRing | None":
        """Boundaries of other stages, and for them; None before `Ready`, and without stages."""

    async def send(self, command: TrainerCommand) -> None:
        """Raises TrainerDied."""

    async def receive(self) -> TrainerEvent:
        """The next event. Raises TrainerDied."""

    def codes(self, region: int) -> memoryview:
        """The codes of a fragment's last send (shared.py)."""


StartTrainer = Callable[[Float32Vector, int | None], AbstractAsyncContextManager[Trainer]]
"""Start a trainer on these slow weights [padded_parameters]; the second argument caps the
micro-batch (after an out-of-memory), None leaves it to the run spec."""
