"""One life of the trainer, as microbatches see it: a queue of commands, and shared memory.

Nothing of an old life reaches a new one: each has a line of its own.
"""

import math

import trio

from peer.rounds.way import TrainerLine
from peer.training.stages import messages as told
from peer.training.stages.messages import StageCommand
from peer.training.stages.ring import BoundaryRing
from protocol.microbatch.commands import (
    Command,
    Compute,
    FinishIteration,
    Forget,
    Release,
    Resend,
)


class Line:
    """The present life of the trainer: its queue of commands, and its shared memory.

    Attributes:
        free: inbound slots that nobody fills or reads.
    """

    def __init__(self, ring: BoundaryRing) -> None:
        self.ring = ring
        self.commands, self._sent = trio.open_memory_channel[StageCommand](math.inf)
        self._free = list(ring.inbound)
        self._freed = trio.Condition()

    def __repr__(self) -> str:
        return f"<Line over {self.ring!r}, {len(self._free)} slots free>"

    def send(self, command: StageCommand) -> None:
        """Queue a command; there are never more than slots allow."""
        self.commands.send_nowait(command)

    async def run(self, line: TrainerLine) -> None:
        """Pass the commands on, in order."""
        async for command in self._sent:
            await line.send(command)

    async def take_slot(self) -> int:
        """An inbound slot to fill; waits for one."""
        async with self._freed:
            while not self._free:
                await self._freed.wait()
            return self._free.pop()

    async def give_back(self, slot: int) -> None:
        """An inbound slot is free again."""
        async with self._freed:
            self._free.append(slot)
            self._freed.notify()


def for_trainer(command: Command) -> StageCommand | None:
    """What the trainer is told of a command; None when it is not for the trainer."""
    match command:
        case Compute(leg, number, slot, loss):
            return told.Deliver(str(leg), number, slot, loss)
        case Forget(number):
            return told.Drop(number)
        case Resend(number):
            return told.Resend(number)
        case FinishIteration():
            return told.Finish()
        case Release(slot):
            return told.Release(slot)
        case _:
            return None
