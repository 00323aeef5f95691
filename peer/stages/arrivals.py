"""Boundaries that come in: each gets a slot with its credit, and has to begin in time.

A slot of the memory is taken when a boundary is welcome, and whoever was welcomed and sends nothing
keeps it from others. What an honest sender needs until its first byte: it may have offered the move
with the first byte of the one before (transfers.py, rule 1), so the rest of that has to come, and
the trainer's queue and the line to us to be free. That takes as long as microbatches take there:
seconds, or minutes where machines are slow. So the wait is bounded by what it usually is here, and
not by what an iteration may take at most. What was waited for in vain counts as well: where all
have become slow, nothing would come in time to show it.

What has come whole and cannot be decoded is as good as broken off: a trainer would end with it. To
look at megabytes of values takes time, which others need for their beats, so that is done in
`Work`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from peer.network.conversation import Conversation, StreamStalled
from peer.ports import Work
from protocol.errors import RemoteProtocolError
from protocol.schedule.deadline import ObservedDeadline
from protocol.wire.messages import Boundary, Credit

from .line import Line
from .transfers import ANSWER_S

SEVERAL: Final = 4
"""Times the usual wait that is at least allowed, doubled by the deadline."""
FLOOR_S: Final = 60.0
"""A machine that averages, or writes a checkpoint, may make others wait for so long."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A boundary that has come whole.

    Attributes:
        slot: where it lies.
        took_s: from its first byte to its last.
    """

    loss: float | None
    slot: int
    took_s: float


class Arrivals:
    """See the top of the file.

    Args:
        patience_s: longest wait for the first byte.
    """

    def __init__(self, work: Work, patience_s: float) -> None:
        self._work = work
        self._usual = ObservedDeadline(floor_s=min(FLOOR_S, patience_s), ceiling_s=patience_s)

    def __repr__(self) -> str:
        return f"<Arrivals, {self._usual!r}>"

    async def receive(
        self, talk: Conversation, line: Line, offered_s: float, begun: Callable[[], None]
    ) -> Arrived:
        """Welcome a boundary, and take it.

        Args:
            offered_s: when it was offered.
            begun: called with its first byte.
        """
        slot = await line.take_slot()
        try:
            await talk.send(Credit(trio.current_time() - offered_s), stall_s=ANSWER_S)
            return await self._fill(talk, line, slot, begun)
        except BaseException:
            line.give_back(slot)
            raise

    async def _fill(
        self, talk: Conversation, line: Line, slot: int, begun: Callable[[], None]
    ) -> Arrived:
        welcome_s, codes = trio.current_time(), line.ring.slot(slot)
        begun_s = [0.0]

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
        took_s = trio.current_time() - begun_s[0]
        if not await self._work.run(line.ring.is_sound, slot):
            raise RemoteProtocolError("a boundary holds values that are not finite")
        self._usual.observe(SEVERAL * (begun_s[0] - welcome_s))
        return Arrived(boundary.loss, slot, took_s)
