"""Microbatches, as the round loop sees them, where the trainer holds a stage of a pipeline.

The loop opens and closes rounds as for a whole model; what travels within a step is not its
business, so it passes the trainer's words about it on.
"""

from typing import Protocol

from protocol.microbatch.trainer_messages import StageEvent

from .way import TrainerLine


class Microbatches(Protocol):
    """What deals with them."""

    def began(self, line: TrainerLine) -> None:
        """A trainer has started; it holds none."""

    async def took(self, event: StageEvent) -> None:
        """The trainer has said something of them."""

    def step_of(self, step: float) -> float:
        """The nominal step at which a round was closed, as it counts for what comes next.

        A relay trains for as long as data peers do, so it is never ahead of them.
        """

    async def wait_unneeded(self) -> None:
        """After the last round: wait until nobody needs our trainer any more, or for long."""
