"""Boundaries on streams: a stream for each move of a microbatch, offered before it is sent.

sender      Offer            what it is; the answer is the credit, and may take a while
            Boundary         the codes, straight from shared memory into shared memory
receiver    Credit, Kept     from then on the receiver answers for it

Rules
  1. A move is offered *ahead*, with the first byte of the move before it: while the boundary comes
     in and the trainer works on it, the credit for the next hop is on its way. So a hop takes the
     line's latency once, not three times, and a slot is taken little sooner than it is needed. Such
     an offer holds a stream, and a slot at its receiver, so it is taken back when there will be
     nothing to send: the microbatch is lost or halted, or the move before broke off or was in vain.
  2. To one peer boundaries go one after another, in the order in which they are ready: two that
     share a line would both be there as late as the second. p2pd takes more than the line carries,
     so the next one waits for most of the time that the line was measured to need, or until the
     receiver has the one before.
  3. Streams are used again (`KeptStreams`), one for each move that is under way.
  4. A boundary is written at the pace of the line. All streams to a peer share one connection, and
     what waits in its buffers holds up yamux's window updates for what comes the other way: two
     boundaries that met took three times as long.

A fresh stream begins with a small window (yamux: 256 KiB), and needs some round trips until it
fills a long line; that was most of a boundary's time. So a stream on which a move has ended well is
kept, so many to one peer as moves were under way at once.
"""

import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

import trio

from peer.network.conversation import Conversation
from peer.network.pacing import Pacing
from peer.ports import Network, PeerId
from protocol.errors import LocoError, Refused, RemoteProtocolError
from protocol.microbatch.trip import Leg, Microbatch, Trip
from protocol.wire.stage_messages import Boundary, Credit, Halted, Kept, Noted, Offer
from protocol.wire.versions import STAGE

from .notices import Notice
from .stopwatch import Stopwatch

# --- kept streams ---------------------------------------------------------------------------------

SERVED_IDLE_S: Final = 120.0
"""How long the side that serves waits for the next message on a stream."""
KEPT_IDLE_S: Final = 60.0
"""A stream that was idle for longer is not used again: the other side may just be ending it."""
MAX_KEPT: Final = 8
"""Idle streams to one peer."""


class KeptStreams:
    """See the top of the file."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._idle: defaultdict[PeerId, list[tuple[float, Conversation]]] = defaultdict(list)

    async def take(self, peer_id: PeerId) -> Conversation:
        """A stream to this peer, the newest of those that are kept, or a fresh one.

        Raises:
            LocoError: none is kept, and none can be opened.
        """
        now_s, idle = trio.current_time(), self._idle[peer_id]
        while idle:
            since_s, talk = idle.pop()
            if now_s - since_s < KEPT_IDLE_S:
                return talk
            await talk.aclose()
        return Conversation(await self._network.open_stream(peer_id, STAGE))

    async def forget(self, peer_id: PeerId) -> None:
        """Close all that is kept to this peer: one has failed, as all do when it starts again."""
        for _, talk in self._idle.pop(peer_id, []):
            await talk.aclose()

    async def keep(self, talk: Conversation) -> None:
        """Use it again: what it was used for has ended well."""
        idle = self._idle[talk.remote_peer_id]
        idle.append((trio.current_time(), talk))
        if len(idle) > MAX_KEPT:
            await idle.pop(0)[1].aclose()


# --- transfers ------------------------------------------------------------------------------------

A = TypeVar("A", Noted, Halted)
ANSWER_S: Final = 10.0
"""Patience for small answers, and for the next part of a boundary."""
KEPT_S: Final = 60.0
"""Patience for the receipt: what we have sent may still be under way on a thin line."""
MAX_AHEAD: Final = 64
"""Moves offered ahead at once: more than a machine has microbatches, there and back. A further one
is offered when it is there."""

DRAINED: Final = 0.9
"""Part of a boundary's time on the line after which the next one is handed to p2pd."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A boundary to be sent.

    Attributes:
        group: digest of the receiver's.
    """

    trip: Trip
    group: str
    codes: memoryview
    loss: float | None


@dataclass(slots=True)
class _Ahead:
    """A move that was offered before there is anything to send.

    Attributes:
        is_tried: whether it has begun to be offered.
        tried: set when it was offered, or could not be.
        talk: the stream on which it was.
    """

    is_tried: bool = False
    tried: trio.Event = field(default_factory=trio.Event)
    talk: Conversation | None = None
    is_withdrawn: bool = False


class Transfers:
    """The sender's side.

    Args:
        credit_s: longest wait for an answer to an offer.
        stopwatch: is told how long everything took.
        pacing: is told how fast boundaries go.
    """

    def __init__(
        self,
        network: Network,
        credit_s: float,
        stopwatch: Stopwatch,
        pacing: Pacing | None = None,
    ) -> None:
        self._credit_s = credit_s
        self._stopwatch = stopwatch
        self._pacing = pacing
        self._streams = KeptStreams(network)
        self._ahead: dict[Trip, _Ahead] = {}
        self._lines: defaultdict[PeerId, trio.Lock] = defaultdict(trio.Lock)

    def plan_ahead(self, trip: Trip) -> None:
        """A move will be offered ahead: `offer_ahead` follows."""
        if len(self._ahead) < MAX_AHEAD:
            self._ahead.setdefault(trip, _Ahead())

    async def offer_ahead(self, trip: Trip, group: str) -> None:
        """Offer a planned move, whose boundary will be there soon (rule 1)."""
        ahead = self._ahead.get(trip)
        if ahead is None or ahead.is_tried:
            return
        ahead.is_tried = True
        with contextlib.suppress(LocoError):
            ahead.talk = await self._offered(trip, group)
        ahead.tried.set()
        if ahead.is_withdrawn and ahead.talk is not None:
            await ahead.talk.aclose()

    async def withdraw(self, microbatch: Microbatch) -> None:
        """Take back what was offered ahead: there will be no such boundary."""
        for trip in [trip for trip in self._ahead if trip.microbatch == microbatch]:
            await self.take_back(trip)

    async def take_back(self, trip: Trip) -> None:
        """Take back one move, if it was offered ahead: what goes before it has not come."""
        ahead = self._ahead.pop(trip, None)
        if ahead is None:
            return
        ahead.is_withdrawn = True
        if ahead.talk is not None:
            await ahead.talk.aclose()

    async def send(self, outgoing: Outgoing) -> bool:
        """Send a boundary. Returns whether the receiver has it."""
        try:
            async with _closed_after_failure(await self._credited(outgoing)) as talk:
                async with self._lines[outgoing.trip.receiver]:
                    began_s = trio.current_time()
                    await talk.send(Boundary(outgoing.loss), outgoing.codes, stall_s=ANSWER_S)
                    is_kept = await self._drained(talk, outgoing.trip.receiver, began_s)
                if not is_kept:
                    await talk.receive(Kept, timeout_s=KEPT_S)
                self._note_sent(outgoing, trio.current_time() - began_s)
        except LocoError as error:
            await self._forget(outgoing.trip.receiver, error)
            return False
        await self._streams.keep(talk)
        return True

    async def _drained(self, talk: Conversation, receiver: PeerId, began_s: float) -> bool:
        """Wait until the line is nearly free again (rule 2). Returns whether the receipt is in."""
        line_s = self._stopwatch.line_s(receiver) or 0.0
        with trio.move_on_at(began_s + DRAINED * line_s):
            await talk.receive(Kept, timeout_s=KEPT_S)
            return True
        return False

    def _note_sent(self, outgoing: Outgoing, elapsed_s: float) -> None:
        """Measure, and keep to what was measured (rule 4)."""
        receiver = outgoing.trip.receiver
        self._stopwatch.sent(receiver, elapsed_s)
        line_s = self._stopwatch.line_s(receiver)
        if line_s is not None and self._pacing is not None:
            self._pacing.measured(receiver, len(outgoing.codes) / line_s)

    async def _credited(self, outgoing: Outgoing) -> Conversation:
        """A stream on which the boundary is welcome. Raises LocoError."""
        trip, ready_s = outgoing.trip, trio.current_time()
        ahead = self._ahead.pop(trip, None)
        if ahead is not None and ahead.is_tried:
            await ahead.tried.wait()
        talk = ahead.talk if ahead is not None else None
        if talk is None:
            talk = await self._offered(trip, outgoing.group)
        async with _closed_after_failure(talk):
            credit, _ = await talk.receive(Credit, timeout_s=self._credit_s)
        self._stopwatch.asked(trio.current_time() - ready_s, credit.waited_s)
        return talk

    async def _offered(self, trip: Trip, group: str) -> Conversation:
        """A stream on which the move was offered. Raises LocoError."""
        async with _closed_after_failure(await self._streams.take(trip.receiver)) as talk:
            await talk.send(offer_of(trip, group), stall_s=ANSWER_S)
        return talk

    async def ask(self, peer_id: PeerId, question: Notice, answer: type[A]) -> A | None:
        """Say a small thing. Returns the answer; None when there is none."""
        try:
            async with _closed_after_failure(await self._streams.take(peer_id)) as talk:
                await talk.send(question, stall_s=ANSWER_S)
                found, _ = await talk.receive(answer, timeout_s=ANSWER_S)
        except LocoError as error:
            await self._forget(peer_id, error)
            return None
        await self._streams.keep(talk)
        return found

    async def _forget(self, peer_id: PeerId, error: Exception) -> None:
        """After a stream has failed: other kept ones to that peer may be as dead."""
        if not isinstance(error, Refused):
            await self._streams.forget(peer_id)


@contextlib.asynccontextmanager
async def _closed_after_failure(talk: Conversation) -> AsyncIterator[Conversation]:
    """Close the stream if the block fails or is cancelled."""
    try:
        yield talk
    except BaseException:
        with trio.CancelScope(shield=True):
            await talk.aclose()
        raise


def offer_of(trip: Trip, group: str) -> Offer:
    """A trip as its receiver is asked for it."""
    microbatch = trip.microbatch
    return Offer(
        group,
        microbatch.origin,
        microbatch.iteration,
        microbatch.index,
        trip.leg,
        trip.path,
        trip.place,
        trip.stages,
        trip.plan,
        trip.attempt,
        trip.until,
    )


def trip_of(offer: Offer, sender: PeerId, receiver: PeerId) -> Trip:
    """The trip of an offer, checked against the ends of its stream.

    Raises:
        RemoteProtocolError: this sender has no business with it, or it is not for us.
    """
    microbatch = Microbatch(offer.origin, offer.iteration, offer.index)
    leg = Leg(offer.leg)
    trip = Trip(
        microbatch,
        leg,
        offer.path,
        offer.place,
        offer.stages,
        offer.plan,
        offer.attempt,
        offer.until,
    )
    if len(set(trip.path)) != len(trip.path) or not trip.path or offer.origin in trip.path:
        raise RemoteProtocolError("a path visits every peer once, its data peer never")
    if trip.place > len(trip.path) + 1 or (trip.sender, trip.receiver) != (sender, receiver):
        raise RemoteProtocolError("a boundary goes from one peer of its path to the next")
    if len(trip.stages) != len(trip.path):
        raise RemoteProtocolError("a path says the stage of each of its relays")
    return trip
