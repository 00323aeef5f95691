"""Boundaries on streams: a stream for each hop of a microbatch, offered before it is sent.

sender      Hop              what it is; the answer is the credit, and may take a while
            Boundary         the codes, straight from shared memory into shared memory
receiver    Credit, BoundaryKept    from then on the receiver answers for it

Rules
  1. A hop is offered *ahead*, with the first byte of the hop before it: while the boundary comes
     in and the trainer works on it, the credit for the next hop is on its way. So it takes the
     line's latency once, not three times, and a slot is taken little sooner than it is needed. Such
     an offer holds a stream, and a slot at its receiver, so it is taken back when the microbatch is
     lost, or the hop before broke off or was in vain.
  2. To one peer boundaries go one after another, in the order in which they are ready: two that
     share a line would both be there as late as the second. p2pd takes more than the line carries,
     so the next one waits for most of the time that the line was measured to need, or until the
     receiver has the one before.
  3. A stream on which a hop has ended well is used again. A fresh one begins with a small window
     (yamux: 256 KiB), and needs some round trips until it fills a long line; that was most of a
     boundary's time. As many streams to a peer are kept as hops to it were ever under way at once.
  4. A boundary is written at the pace of the line. All streams to a peer share one connection, and
     what waits in its buffers holds up yamux's window updates for what comes the other way: two
     boundaries that met took three times as long.

Of those that come in each gets a slot with its credit, and has to begin in time.

Credit reserves a slot, and a sender that then sends nothing keeps the slot from others. An honest
sender may need seconds or minutes until its first byte: it may have offered the hop with the first
byte of the one before (rule 1), and waits for the rest of that, for the trainer's queue and for the
line. So the wait is bounded by what it usually is here, and not by what an iteration may take at
most. What was waited for in vain counts as well: where all have become slow, nothing would come in
time to show it.

A boundary is measured before a trainer sees it. One that cannot be right counts as broken off: what
cannot be decoded, or is larger than any honest peer's, breaks the protocol; what is far larger than
usual is refused, and nobody is blamed (protocol/microbatch/sizes.py). To look at megabytes of
values takes time, which others need for their beats, so that is done in `Work`.

Also here: one life of the trainer, as microbatches see it (`StageSession`): a queue of commands,
and shared memory. Nothing of an old life reaches a new one.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from peer.network.conversation import Conversation, StreamStalled
from peer.network.pacing import Pacing
from peer.rounds.way import TrainerLine
from peer.runtime import Network, PeerId, Work
from peer.training.shared import BoundaryRing
from protocol.errors import LocoError, Refused, RemoteProtocolError
from protocol.limits import ANSWER_S, SEND_STALL_S
from protocol.microbatch.core import SendBoundary
from protocol.microbatch.iterations import SEVERAL
from protocol.microbatch.sizes import BoundarySizes, SizeVerdict
from protocol.microbatch.trainer_messages import Freed, StageCommand
from protocol.outcomes import RefusalReason
from protocol.schedule.deadline import ObservedDeadline
from protocol.wire import stage_messages
from protocol.wire.messages import Refusal
from protocol.wire.versions import STAGE

from .stopwatch import Stopwatch

SERVED_IDLE_S: Final = 120.0
"""How long the side that serves waits for the next message on a stream. One idle for half of it is
not used again: the other side may just be ending it."""
MAX_AHEAD: Final = 64
"""Hops offered ahead at once: more than a machine has microbatches, there and back."""
DRAINED: Final = 0.9
"""Part of a boundary's time on the line after which p2pd is given the next one."""


@dataclass(slots=True)
class _Ahead:
    """A hop that was offered before there is anything to send.

    Attributes:
        is_tried: whether it has begun to be offered.
        tried: set when it was offered, or could not be.
        talk: the stream on which it was.
    """

    is_tried: bool = False
    tried: trio.Event = field(default_factory=trio.Event)
    talk: Conversation | None = None
    is_withdrawn: bool = False


@dataclass(eq=False)
class BoundarySender:
    """Offers boundaries to other peers, and sends them.

    Args:
        credit_s: longest wait for an answer to an offer.
    """

    _network: Network
    _credit_s: float
    _stopwatch: Stopwatch
    _pacing: Pacing | None = None

    def __post_init__(self) -> None:
        self._idle = defaultdict[PeerId, list[tuple[float, Conversation]]](list)
        self._ahead: dict[stage_messages.Hop, _Ahead] = {}
        self._lines = defaultdict[PeerId, trio.Lock](trio.Lock)

    def plan_ahead(self, hop: stage_messages.Hop) -> None:
        if len(self._ahead) < MAX_AHEAD:
            self._ahead.setdefault(hop, _Ahead())

    async def offer_ahead(self, receiver: PeerId, hop: stage_messages.Hop) -> None:
        """Offer a planned hop, whose boundary will be there soon (rule 1)."""
        ahead = self._ahead.get(hop)
        if ahead is None or ahead.is_tried:
            return
        ahead.is_tried = True
        with contextlib.suppress(LocoError):
            ahead.talk = await self._offered(receiver, hop)
        ahead.tried.set()
        if ahead.is_withdrawn and ahead.talk is not None:
            await ahead.talk.aclose()

    async def withdraw(self, microbatch: stage_messages.Microbatch, attempt: int) -> None:
        """Take back what was offered ahead up to an attempt: there will be no such boundary."""
        for hop in list(self._ahead):
            if hop.microbatch == microbatch and hop.attempt <= attempt:
                await self.take_back(hop)

    async def take_back(self, hop: stage_messages.Hop) -> None:
        """Take back one hop, if it was offered ahead: what goes before it has not come."""
        ahead = self._ahead.pop(hop, None)
        if ahead is None:
            return
        ahead.is_withdrawn = True
        if ahead.talk is not None:
            await ahead.talk.aclose()

    async def send(self, receiver: PeerId, command: SendBoundary, codes: memoryview) -> bool:
        """Send a boundary. Returns whether the receiver has it."""
        try:
            async with _closed_after_failure(await self._credited(receiver, command.hop)) as talk:
                async with self._lines[receiver]:
                    began_s = trio.current_time()
                    await talk.send(stage_messages.Boundary(command.loss), codes, stall_s=ANSWER_S)
                    is_kept = await self._drained(talk, receiver, began_s)
                if not is_kept:
                    await talk.receive(stage_messages.BoundaryKept, timeout_s=SEND_STALL_S)
                line_s = self._stopwatch.sent(receiver, trio.current_time() - began_s)
        except LocoError as error:
            await self._failed(receiver, error)
            return False
        if line_s is not None and self._pacing is not None:  # keep to it (rule 4)
            self._pacing.measured(receiver, len(codes) / line_s)
        self._keep(receiver, talk)
        return True

    async def _drained(self, talk: Conversation, receiver: PeerId, began_s: float) -> bool:
        """Wait until the line is nearly free again (rule 2). Returns whether the receipt is in."""
        line_s = self._stopwatch.measures.line_s(receiver) or 0.0
        with trio.move_on_at(began_s + DRAINED * line_s):
            await talk.receive(stage_messages.BoundaryKept, timeout_s=SEND_STALL_S)
            return True
        return False

    async def _credited(self, receiver: PeerId, hop: stage_messages.Hop) -> Conversation:
        """A stream on which the boundary, which is ready, is welcome. Raises LocoError."""
        ready_s, ahead = trio.current_time(), self._ahead.pop(hop, None)
        if ahead is not None and ahead.is_tried:
            await ahead.tried.wait()
        talk = ahead.talk if ahead is not None else None
        if talk is None:
            talk = await self._offered(receiver, hop)
        async with _closed_after_failure(talk):
            credit, _ = await talk.receive(stage_messages.Credit, timeout_s=self._credit_s)
        self._stopwatch.asked(trio.current_time() - ready_s, credit.waited_s)
        return talk

    async def _offered(self, receiver: PeerId, hop: stage_messages.Hop) -> Conversation:
        async with _closed_after_failure(await self._take(receiver)) as talk:
            await talk.send(hop, stall_s=ANSWER_S)
        return talk

    async def ask(
        self, peer_id: PeerId, question: stage_messages.Notice
    ) -> stage_messages.Noted | None:
        """Send a notice. Returns the answer; None where no answer came."""
        try:
            async with _closed_after_failure(await self._take(peer_id)) as talk:
                await talk.send(question, stall_s=ANSWER_S)
                answer, _ = await talk.receive(stage_messages.Noted, timeout_s=ANSWER_S)
        except LocoError as error:
            await self._failed(peer_id, error)
            return None
        self._keep(peer_id, talk)
        return answer

    async def _take(self, peer_id: PeerId) -> Conversation:
        """A stream to this peer, the newest of those that are kept, or a fresh one.

        Raises:
            LocoError: none is kept, and none can be opened.
        """
        now_s, idle = trio.current_time(), self._idle[peer_id]
        while idle:
            since_s, talk = idle.pop()
            if now_s - since_s < SERVED_IDLE_S / 2:
                return talk
            await talk.aclose()
        return Conversation(await self._network.open_stream(peer_id, STAGE))

    def _keep(self, peer_id: PeerId, talk: Conversation) -> None:
        self._idle[peer_id].append((trio.current_time(), talk))

    async def _failed(self, peer_id: PeerId, error: LocoError) -> None:
        """A stream has: other kept ones to that peer may be as dead. No refusal is a failure."""
        if not isinstance(error, Refused):
            for _, talk in self._idle.pop(peer_id, []):
                await talk.aclose()


@contextlib.asynccontextmanager
async def _closed_after_failure(talk: Conversation) -> AsyncIterator[Conversation]:
    try:
        yield talk
    except BaseException:
        await talk.aclose()
        raise


# --- what comes in --------------------------------------------------------------------------------
class StageSession:
    """One life of the trainer: its queue of commands, and its shared memory."""

    def __init__(self, ring: BoundaryRing) -> None:
        self.ring, self._inbound = ring, ring.inbound
        self._commands, self._sent = trio.open_memory_channel[StageCommand](math.inf)
        self._give, self._free = trio.open_memory_channel[int](len(ring.inbound))
        for slot in self._inbound:
            self._give.send_nowait(slot)

    def send(self, command: StageCommand) -> None:
        """Queue a command, or take an inbound slot back; there are never more than slots allow."""
        if isinstance(command, Freed) and command.slot in self._inbound:
            self._give.send_nowait(command.slot)
        else:
            self._commands.send_nowait(command)

    async def run(self, line: TrainerLine) -> None:
        async for command in self._sent:
            await line.send(command)

    async def take_slot(self) -> int:
        return await self._free.receive()


FLOOR_S: Final = 60.0
"""A machine that averages, or writes a checkpoint, may make others wait for so long."""


class Unusual(LocoError):
    """A boundary is far larger than usual, and its sender was told so."""


class BoundaryReceiver:
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
        session: StageSession,
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
        since_s, slot = trio.current_time(), await session.take_slot()
        try:
            credit = stage_messages.Credit(waited_s + trio.current_time() - since_s)
            await talk.send(credit, stall_s=ANSWER_S)
            loss, took_s = await self._fill(talk, session.ring.slot(slot), begun)
            size = await self._work.run(session.ring.size, slot)
            await self._check(talk, size, kind)
        except BaseException:
            session.send(Freed(slot))
            raise
        return slot, loss, took_s

    async def _fill(
        self, talk: Conversation, codes: memoryview, begun: Callable[[], None]
    ) -> tuple[float | None, float]:
        welcome_s, begun_s = trio.current_time(), [0.0]

        def begins(_message: stage_messages.Boundary, num_bytes: int) -> memoryview:
            if num_bytes != len(codes):
                raise RemoteProtocolError(f"a boundary has {len(codes)} bytes, not {num_bytes}")
            begun_s[0] = trio.current_time()
            begun()
            return codes

        try:
            boundary, _ = await talk.receive(
                stage_messages.Boundary,
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
            with contextlib.suppress(LocoError):
                refusal = Refusal(RefusalReason.IMPLAUSIBLE, sentence)
                await talk.send(refusal, stall_s=ANSWER_S)
            raise Unusual(sentence)
