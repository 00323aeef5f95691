"""Boundaries that come in: each gets a slot with its credit, and has to begin in time.

A slot of the memory is taken when a boundary is welcome, and a welcome sender that sends nothing
keeps it from others. What an honest sender needs until its first byte: it may have offered the move
with the first byte of the one before (transfers.py, rule 1), so the rest of that has to come, and
the trainer's queue and the line to us to be free. That takes seconds, or minutes where machines are
slow, so the wait is bounded by what it usually is here, and not by what an iteration may take at
most. What was waited for in vain counts as well: where all have become slow, nothing would come in
time to show it.

A boundary is measured before a trainer sees it. One that cannot be right counts as broken off: what
cannot be decoded, or is larger than any honest peer's, breaks the protocol; what is far larger than
usual is refused, and nobody is blamed (protocol/microbatch/sizes.py). To look at megabytes of
values takes time, which others need for their beats, so that is done in `Work`.

Also here: one life of the trainer, as microbatches see it (`Line`): a queue of commands, and shared
memory. Nothing of an old life reaches a new one.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import trio

from peer.network.conversation import Conversation, StreamStalled
from peer.rounds.way import TrainerLine
from peer.runtime import PeerId, Work
from peer.training.shared import BoundaryRing
from protocol.errors import LocoError, RemoteProtocolError
from protocol.microbatch.iterations import SEVERAL
from protocol.microbatch.sizes import BoundarySizes, SizeVerdict
from protocol.microbatch.trainer_messages import Freed, StageCommand
from protocol.outcomes import RefusalReason
from protocol.schedule.deadline import ObservedDeadline
from protocol.wire.messages import Refusal
from protocol.wire.stage_messages import Boundary, Credit

from .transfers import ANSWER_S


class Line:
    """The present life of the trainer: its queue of commands, and its shared memory."""

    def __init__(self, ring: BoundaryRing) -> None:
        self.ring, self._inbound = ring, ring.inbound
        self._commands, self._sent = trio.open_memory_channel[StageCommand](math.inf)
        self._give, self._free = trio.open_memory_channel[int](len(ring.inbound))
        for slot in self._inbound:
            self._give.send_nowait(slot)
        self._read: Counter[int] = Counter()
        self._released: set[int] = set()

    @property
    def num_free(self) -> int:
        """Inbound slots that nobody fills or reads."""
        return self._free.statistics().current_buffer_used

    def send(self, command: StageCommand) -> None:
        """Queue a command, or take an inbound slot back; there are never more than slots allow.

        A slot that is still being sent is freed when that has ended.
        """
        if not isinstance(command, Freed):
            self._commands.send_nowait(command)
        elif command.slot in self._inbound:
            self._give.send_nowait(command.slot)
        elif self._read[command.slot]:
            self._released.add(command.slot)
        else:
            self._commands.send_nowait(command)

    @contextmanager
    def reading(self, slot: int) -> Iterator[memoryview]:
        """An outbound slot, which is not freed meanwhile."""
        self._read[slot] += 1
        try:
            yield self.ring.slot(slot)
        finally:
            self._read[slot] -= 1
            if slot in self._released and not self._read[slot]:
                self._released.remove(slot)
                self._commands.send_nowait(Freed(slot))

    async def run(self, line: TrainerLine) -> None:
        async for command in self._sent:
            await line.send(command)

    async def take_slot(self) -> int:
        return await self._free.receive()


FLOOR_S: Final = 60.0
"""A machine that averages, or writes a checkpoint, may make others wait for so long."""


class Unusual(LocoError):
    """A boundary is far larger than usual, and its sender was told so."""


class Arrivals:
    """Takes boundaries from streams into the slots of the ring.

    Args:
        patience_s: longest wait for the first byte.
    """

    def __init__(self, work: Work, patience_s: float) -> None:
        self._work = work
        self._usual = ObservedDeadline(floor_s=min(FLOOR_S, patience_s), ceiling_s=patience_s)
        self._sizes = BoundarySizes()

    async def receive(
        self,
        talk: Conversation,
        line: Line,
        kind: tuple[PeerId, int | None, bool],
        waited_s: float,
        begun: Callable[[], None],
    ) -> tuple[int, float | None, float]:
        """Welcome a boundary, and take it.

        Args:
            kind: its sender, whose stage is not always known, and whether it is a gradient.
            waited_s: how long its offer has waited.
            begun: called with its first byte.

        Returns:
            The slot that it lies in, its loss, and the seconds from its first byte to its last.

        Raises:
            RemoteProtocolError: it cannot be an honest one.
            Unusual: it is far larger than usual.
            StreamLost: it has not come whole.
        """
        since_s, slot = trio.current_time(), await line.take_slot()
        try:
            credit = Credit(waited_s + trio.current_time() - since_s)
            await talk.send(credit, stall_s=ANSWER_S)
            loss, took_s = await self._fill(talk, line.ring.slot(slot), begun)
            size = await self._work.run(line.ring.size, slot)
            await self._check(talk, size, kind)
        except BaseException:
            line.send(Freed(slot))
            raise
        return slot, loss, took_s

    async def _fill(
        self, talk: Conversation, codes: memoryview, begun: Callable[[], None]
    ) -> tuple[float | None, float]:
        welcome_s, begun_s = trio.current_time(), [0.0]

        def begins(_message: Boundary, num_bytes: int) -> memoryview:
            if num_bytes != len(codes):
                raise RemoteProtocolError(f"a boundary has {len(codes)} bytes, not {num_bytes}")
            begun_s[0] = trio.current_time()
            begun()
            return codes

        try:
            boundary, _ = await talk.receive(
                Boundary,
                place=begins,
                max_payload_bytes=len(codes),
                timeout_s=self._usual.current_s,
                stall_s=ANSWER_S,
            )
        except StreamStalled:
            if not begun_s[0]:
                self._usual.observe(SEVERAL * (trio.current_time() - welcome_s))
            raise
        self._usual.observe(SEVERAL * (begun_s[0] - welcome_s))
        return boundary.loss, trio.current_time() - begun_s[0]

    async def _check(
        self, talk: Conversation, size: float, kind: tuple[PeerId, int | None, bool]
    ) -> None:
        sender, stage, is_gradient = kind
        verdict = self._sizes.judge(sender, size, stage=stage, is_gradient=is_gradient)
        if verdict is SizeVerdict.IMPOSSIBLE:
            raise RemoteProtocolError(f"a boundary's values are not finite, or huge: {size:.3g}")
        if verdict is SizeVerdict.UNUSUAL:
            sentence = f"a boundary of {size:.3g} is far larger than those of others"
            with suppress(LocoError):
                refusal = Refusal(RefusalReason.IMPLAUSIBLE, sentence)
                await talk.send(refusal, stall_s=ANSWER_S)
            raise Unusual(sentence)
