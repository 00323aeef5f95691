"""One life of the trainer, as microbatches see it: a queue of commands, and shared memory.

Nothing of an old life reaches a new one: each has a line of its own.
"""

import math
from collections import Counter

import trio

from peer.rounds.way import TrainerLine
from peer.training.stages.ring import BoundaryRing
from protocol.microbatch import trainer_messages as told
from protocol.microbatch.trainer_messages import (
    StageCommand,
)


class Line:
    """The present life of the trainer: its queue of commands, and its shared memory.

    Attributes:
        ring: that memory.
    """

    def __init__(self, ring: BoundaryRing) -> None:
        self.ring = ring
        self._commands, self._sent = trio.open_memory_channel[StageCommand](math.inf)
        self._give, self._free = trio.open_memory_channel[int](len(ring.inbound))
        for slot in ring.inbound:
            self._give.send_nowait(slot)
        self._read: Counter[int] = Counter()
        self._released: set[int] = set()

    @property
    def num_free(self) -> int:
        """Inbound slots that nobody fills or reads."""
        return self._free.statistics().current_buffer_used

    def send(self, command: StageCommand) -> None:
        """Queue a command; there are never more than slots allow.

        A slot that is still being sent is released when that has ended.
        """
        if isinstance(command, told.Release) and self._read[command.slot]:
            self._released.add(command.slot)
        else:
            self._commands.send_nowait(command)

    def begin_reading(self, slot: int) -> None:
        """An outbound slot is being sent."""
        self._read[slot] += 1

    def end_reading(self, slot: int) -> None:
        """It is no longer."""
        self._read[slot] -= 1
        if slot in self._released and not self._read[slot]:
            self._released.remove(slot)
            self._commands.send_nowait(told.Release(slot))

    async def run(self, line: TrainerLine) -> None:
        """Pass the commands on, in order."""
        async for command in self._sent:
            await line.send(command)

    async def take_slot(self) -> int:
        """An inbound slot to fill; waits for one."""
        return await self._free.receive()

    def give_back(self, slot: int) -> None:
        """An inbound slot is free again."""
        self._give.send_nowait(slot)
