"""A way of averaging, as the round loop sees it, and the trainer, as a way of averaging sees it.

    RoundLoop (loop.py)         lives of the trainer, rounds, validation, the end of the run
      has a Way                 what is exchanged with the other peers, and when
        PairRounds              NoLoCo: whole models, or fragments, each with a partner of its own
        FragmentRounds          Streaming DiLoCo: fragments, each at its own moment, with all

Events go into a way; it commands the trainer through the `TrainerLine` of the current life, and it
delays the next round by not returning.
"""

from collections.abc import Sequence
from typing import Protocol

import trio

from peer.training.messages import Ready, RoundClosed, SyncEvent, TrainerCommand
from peer.training.ports import Trainer, TrainerDied
from protocol.membership.view import Member
from protocol.schedule.rounds import RoundPlan


class TrainerLine:
    """One life of the trainer, for those who send it commands.

    Attributes:
        trainer: of this life.
        nursery: ends with it.
    """

    def __init__(self, trainer: Trainer, nursery: trio.Nursery) -> None:
        self.trainer = trainer
        self.nursery = nursery

    async def send(self, command: TrainerCommand) -> None:
        """Send, and do not mind if the trainer is gone: the reader of its events learns of it."""
        try:
            await self.trainer.send(command)
        except TrainerDied:
            pass

    def send_soon(self, command: TrainerCommand) -> None:
        """The same, without waiting."""
        self.nursery.start_soon(self.send, command)


class Way(Protocol):
    """A way of averaging while rounds run."""

    # --- which rounds are trained -----------------------------------------------------------------
    def enter(self, others: Sequence[Member]) -> None:
        """A life of the trainer begins: go on where the others are."""

    def next_round(self, others: Sequence[Member]) -> RoundPlan | None:
        """The next round of training; None when the training is over."""

    def closes_early(self, steps: int, others: Sequence[Member]) -> bool:
        """Whether the round in training, so far, should be closed before its quota is done."""

    async def next_final_round(self) -> RoundPlan | None:
        """After the training: the next round without steps; None when averaging is over.

        Raises:
            JoinAgain: the others have ended the run without us.
        """

    # --- what happens to them ---------------------------------------------------------------------
    def began(self, line: TrainerLine, ready: Ready) -> None:
        """A trainer has started; it has nothing loaded."""

    def progressed(self) -> None:
        """The trainer tells how far it is: it has taken what it loaded."""

    async def closed(self, closed: RoundClosed, others: Sequence[Member]) -> None:
        """A round is closed: see to it that its work is averaged.

        Returns when the next round may begin.
        """

    async def took(self, event: SyncEvent) -> None:
        """An event of averaging."""

    async def died(self) -> None:
        """The trainer is gone: end what needs one."""

    def leave(self) -> None:
        """Begin no exchange any more: this peer is going."""

    async def wait_settled(self) -> None:
        """Wait until no exchange is under way that is worth waiting for."""
