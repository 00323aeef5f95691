"""Microbatches, as the round loop sees them, where the trainer holds a stage of a pipeline.

The loop opens and closes rounds as for a whole model; what travels within a step is not its
business, so it passes the trainer's words about it on.
"""

from typing import Protocol

from peer.training.stages.messages import StageEvent

from .way import TrainerLine


class Microbatches(Protocol):
    """What deals with them."""

    def began(self, line: TrainerLine) -> None:
        """A trainer has started; it holds none."""

    async def took(self, event: StageEvent) -> None:
        """The trainer has said something of them."""
