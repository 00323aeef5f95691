"""Checkpoints, as the round loop sees them.

Between two rounds nothing is trained, and where a peer is alone nothing is on its way either: then
a checkpoint is a state from which the same training follows, bit for bit. So that is when one is
written, if it is time. What is written, and where, is not the loop's business.
"""

from typing import Protocol

from peer.training.messages import Kept, Load

from .way import TrainerLine, Way


class Checkpoints(Protocol):
    """What writes them, and what a trainer goes on from after a restart of the daemon."""

    def load(self) -> Load:
        """What the first trainer is told to load; later ones have the slow weights alone."""

    def began(self, line: TrainerLine) -> None:
        """A trainer has started."""

    async def between_rounds(self, way: Way) -> None:
        """Write one, if it is time."""

    async def write(self, way: Way) -> None:
        """Write one now."""

    async def write_last(self, way: Way, until_s: float) -> None:
        """Write one in the midst of a round; the trainer's part is waited for until then."""

    def took(self, kept: Kept) -> None:
        """The trainer's part is written, or is not."""

    def died(self) -> None:
        """The trainer is gone."""
