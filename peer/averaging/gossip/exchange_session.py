"""One exchange (protocol/gossip/exchange.py) on its streams: two vectors and two receipts.

Both directions run at once; only the peer that was asked waits for the other's first bytes, since
its yes may have come too late, and a vector sent to nobody costs as much as any. This file moves
bytes, and checks what arrived; `ExchangeSide` tells what follows.

    one stream    a vector follows its head; a receipt waits until our own vector is out
    packed        a vector that travels as differences is read against our own; blocks that could
                  not be read are asked for before the receipt (packing.py)
    stripes       the vectors travel in pieces (protocol/wire/pieces.py) on further streams, which
                  the proposer opens; heads and receipts stay on the first stream. Losing a stream
                  before both vectors are through loses the exchange; all stay open until it is over

The head says how long a packed vector is; pieces that come before it wait. A stripe is used in both
directions: it takes the next piece when it has room, and puts what arrives straight into its place.
A stall is judged over all streams: on a slow link one may have nothing to carry long before the
last piece is through on another.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import trio

from peer.network.conversation import Conversation, StreamStalled
from peer.runtime import Network, PeerId
from protocol.errors import LocalProtocolError, LocoError, Refused, RemoteProtocolError, StreamLost
from protocol.gossip.exchange import ExchangeSide, Marks, map_of
from protocol.gossip.matchmaking import RoundSnapshot
from protocol.limits import PIECE_BYTES
from protocol.outcomes import SkipReason
from protocol.wire.fields import Message
from protocol.wire.messages import (
    Blocks,
    Join,
    Misread,
    Piece,
    Received,
    Vector,
)
from protocol.wire.pieces import Incoming, OutgoingPieces
from protocol.wire.versions import GOSSIP

from .packing import Reading

GOSSIP_STALL_S: Final = 15.0
"""A stream on which no byte arrives for this long is given up."""


@dataclass(frozen=True, slots=True)
class OwnVector:
    """The contribution of one peer to an exchange.

    Attributes:
        round, step, final: as of `RoundSnapshot`.
        steps, tokens: trained since the snapshot before.
        payload: codes of theta, and behind them codes of phi where gamma != beta.
        packed: the payload as differences, where it travels so.
    """

    round: int
    step: int
    final: bool
    steps: int
    tokens: int
    digest: str
    payload: memoryview
    packed: memoryview | None = None

    @property
    def sent(self) -> memoryview:
        return self.payload if self.packed is None else self.packed

    @property
    def snapshot(self) -> RoundSnapshot:
        return RoundSnapshot(self.round, self.step, self.final)


@dataclass(frozen=True, slots=True)
class Averaged:
    """Both sides hold each other's vector; `payload` is valid until the next exchange."""

    partner_id: PeerId
    steps: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Skipped:
    reason: SkipReason
    partner_id: PeerId | None = None


RoundOutcome = Averaged | Skipped


@dataclass(frozen=True, slots=True)
class AverageEnded:
    """How an average ended, and how long the search and the exchange took."""

    own: OwnVector
    outcome: RoundOutcome
    match_s: float
    exchange_s: float


# --- stripes --------------------------------------------------------------------------------------


class StripedTransfer:
    """Moves one vector each way in pieces; `whole` is set when every piece of theirs is here."""

    def __init__(self, own: memoryview, may_send: trio.Event) -> None:
        self.whole = trio.Event()
        self._own = own
        self._into = memoryview(b"")
        self._may_send = may_send
        self._outgoing = OutgoingPieces(len(own))
        self._incoming = Incoming(0)
        self._expected = trio.Event()
        self._receiving: list[trio.CancelScope] = []
        self._last_byte_s = trio.current_time()

    def expect(self, into: memoryview) -> None:
        """Pieces of the partner's vector go into this buffer; its length is known now."""
        self._into, self._incoming = into, Incoming(len(into))
        self._expected.set()

    async def carry(self, talk: Conversation) -> None:
        """Use a stream until both vectors are through.

        Raises:
            StreamLost: the stream broke, or the partner does not take it for a stripe.
            RemoteProtocolError: what they sent is no piece of this vector.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, talk)
            nursery.start_soon(self._receive, talk)

    async def watch(self) -> None:
        """Wait until their vector is whole. Raises StreamStalled."""
        while not self.whole.is_set():
            stalled_s = self._last_byte_s + GOSSIP_STALL_S
            if trio.current_time() >= stalled_s:
                raise StreamStalled(f"no piece came for {GOSSIP_STALL_S:g} s")
            with trio.move_on_at(stalled_s):
                await self.whole.wait()

    async def _send(self, talk: Conversation) -> None:
        await self._may_send.wait()
        while (piece := self._outgoing.take()) is not None:
            start, stop = piece
            await talk.send(Piece(start), self._own[start:stop])

    async def _receive(self, talk: Conversation) -> None:
        with trio.CancelScope() as scope:
            self._receiving.append(scope)
            await self._expected.wait()
            while not self.whole.is_set():
                await self._receive_piece(talk)

    async def _receive_piece(self, talk: Conversation) -> None:
        try:
            piece, _ = await talk.receive(
                Piece,
                place=self._place,
                max_payload_bytes=PIECE_BYTES,
                on_progress=self._progressed,
            )
        except Refused as refused:
            raise StreamLost(f"the stripe was refused: {refused}") from refused
        self._incoming.arrive(piece.start)
        if self._incoming.is_whole:
            self.whole.set()
            for scope in self._receiving:
                scope.cancel()  # nothing more comes; a stream that waits loses nothing

    def _place(self, piece: Piece, num_bytes: int) -> memoryview:
        self._incoming.announce(piece.start, num_bytes)
        return self._into[piece.start : piece.start + num_bytes]

    def _progressed(self, _: int) -> None:
        self._last_byte_s = trio.current_time()


# --- one exchange ---------------------------------------------------------------------------------


class ExchangeSession:
    """One exchange with one partner, until it is known how it ended.

    Args:
        talk: the stream on which it was agreed.
        following: we were asked; the other side begins, and opens the stripes.

    Attributes:
        over: to be set when the exchange has ended: its stripes may close.
    """

    def __init__(
        self,
        name: str,
        talk: Conversation,
        own: OwnVector,
        reading: Reading,
        network: Network,
        *,
        following: bool,
        num_stripes: int,
    ) -> None:
        self.name, self.partner_id = name, talk.remote_peer_id
        self.side = ExchangeSide()
        self.over = trio.Event()
        self._talk = talk
        self._own = own
        self._reading = reading
        self._network = network
        self._following = following
        self._num_stripes = num_stripes
        self._theirs: Vector | None = None
        self._head_came = trio.Event()
        self._outbox: trio.MemorySendChannel[tuple[Message, bytes]]
        # Until our vector is out: a receipt, and questions for blocks with their answers.
        self._outbox, self._to_send = trio.open_memory_channel[tuple[Message, bytes]](math.inf)
        self._receipt_sent = trio.Event()
        self._may_send = trio.Event()
        if not following:
            self._may_send.set()
        self._stripes: StripedTransfer | None = None
        self._joined: list[Conversation] = []
        self._nursery: trio.Nursery | None = None
        self._listening = trio.CancelScope()

    async def run(self, deadline_s: float) -> RoundOutcome:
        """Exchange until a defined end."""
        with trio.CancelScope(deadline=deadline_s) as timer:
            try:
                await self._run_all()
            except* LocalProtocolError:
                self.side.failed(SkipReason.OWN_MISTAKE)
            except* StreamStalled:
                self.side.failed(SkipReason.PARTNER_STALLED)
            except* StreamLost:
                self.side.failed(SkipReason.PARTNER_LOST)
            except* LocoError:
                self.side.failed(SkipReason.BAD_VECTOR)
        if timer.cancelled_caught:
            self.side.failed(SkipReason.DEADLINE)
        peer_id, theirs = self.partner_id, self._theirs
        if self.side.is_averaged and theirs is not None:
            return Averaged(peer_id, theirs.steps, self._reading.into)
        return Skipped(self.side.reason or SkipReason.LEAVING, peer_id)

    def takes_stripe(self) -> bool:
        has_room = len(self._joined) < self._num_stripes
        return self._following and has_room and not self.side.is_final

    def join(self, talk: Conversation) -> None:
        """The partner has opened a stripe; it must stay open until `over`."""
        self._joined.append(talk)
        if self._stripes is not None and self._nursery is not None:
            self._nursery.start_soon(self._stripes.carry, talk)

    # --- the streams ------------------------------------------------------------------------------
    async def _run_all(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._send)
            if self._num_stripes:
                stripes = self._stripes = StripedTransfer(self._own.sent, self._may_send)
                if not self._reading.packs:
                    stripes.expect(self._reading.room(packed=0))
                nursery.start_soon(self._take_pieces, stripes)
                for talk in self._joined:  # opened before we came here
                    nursery.start_soon(stripes.carry, talk)
                if not self._following:
                    for _ in range(self._num_stripes):
                        nursery.start_soon(self._carry, stripes)
            with self._listening:
                while not self.side.is_final:
                    await self._receive_message()
            if self.side.reason is None:
                await self._receipt_sent.wait()
            nursery.cancel_scope.cancel()

    async def _take_pieces(self, stripes: StripedTransfer) -> None:
        await stripes.watch()
        await self._head_came.wait()
        await self._vector_arrived()

    async def _carry(self, stripes: StripedTransfer) -> None:
        """Open a stripe, and keep it open until the exchange is over."""
        stream = await self._network.open_stream(self.partner_id, GOSSIP)
        async with Conversation(stream) as talk:
            await talk.send(Join(self.name))
            await stripes.carry(talk)
            await trio.sleep_forever()

    async def _send(self) -> None:
        own, reading = self._own, self._reading
        head = Vector(
            self.name,
            own.steps,
            own.tokens,
            reading.codec,
            reading.vectors,
            own.digest,
            packed=0 if own.packed is None else len(own.packed),
        )
        await self._may_send.wait()
        await self._talk.send(head, None if self._num_stripes else own.sent)
        async for message, payload in self._to_send:
            await self._talk.send(message, payload)
            if isinstance(message, Received):
                self._receipt_sent.set()

    def _say(self, message: Message, payload: bytes = b"") -> None:
        self._outbox.send_nowait((message, payload))

    async def _receive_message(self) -> None:
        # Both send at once; a receipt takes as long as what is before it on its way.
        room = memoryview(b"")

        def place(message: Any, num_bytes: int) -> memoryview:
            nonlocal room
            room = self._place(message, num_bytes)
            return room

        message, _ = await self._talk.receive(
            Vector,
            Received,
            Misread,
            Blocks,
            place=place,
            max_payload_bytes=len(self._reading.into),
            timeout_s=GOSSIP_STALL_S if self._theirs is None else math.inf,
            stall_s=GOSSIP_STALL_S,
            on_progress=lambda _: self._may_send.set(),
        )
        match message:
            case Received():
                self._receipt_arrived(message)
            case Misread():
                self._say(Blocks(self.name), await self._reading.answer(room))
            case Blocks():
                await self._read(partial(self._reading.take_blocks, room))
            case Vector():
                self._head_arrived(message)
                if not self._num_stripes:
                    await self._vector_arrived()

    def _place(self, message: Vector | Misread | Blocks, num_bytes: int) -> memoryview:
        """Where the payload goes. Raises RemoteProtocolError before a byte of it is read."""
        if message.exchange != self.name:
            raise RemoteProtocolError("a message of another exchange")
        if isinstance(message, Blocks):
            return self._reading.room_for_blocks(num_bytes)
        if isinstance(message, Misread):
            if self.side.delivered:
                raise RemoteProtocolError("a question for blocks after the receipt")
            return self._reading.room_for_question(num_bytes)
        if self._theirs is not None:
            raise RemoteProtocolError("a second vector in one exchange")
        room = self._reading.room(message.packed)
        due_bytes = 0 if self._num_stripes else len(room)
        if num_bytes != due_bytes:
            raise RemoteProtocolError(f"Vector came with {num_bytes} bytes, not {due_bytes}")
        if self._stripes is not None and self._reading.packs:
            self._stripes.expect(room)
        return room[:num_bytes]

    def _head_arrived(self, vector: Vector) -> None:
        if (vector.codec, vector.vectors) != (self._reading.codec, self._reading.vectors):
            raise RemoteProtocolError("a vector of another code than agreed")
        self._theirs = vector
        self._may_send.set()
        self._head_came.set()

    async def _vector_arrived(self) -> None:
        assert self._theirs is not None
        await self._read(partial(self._reading.take, self._theirs.digest))

    async def _read(self, take: Callable[[], Awaitable[Marks | bool]]) -> None:
        """Read what has come of their vector, and ask for what is missing."""
        found = await take()
        if not isinstance(found, bool):
            self._say(Misread(self.name), map_of(found))
        elif found:
            assert self._theirs is not None
            self.side.holds = True
            self._say(Received(self.name, self._theirs.digest))
        else:
            self.side.failed(SkipReason.BAD_VECTOR)
        self._listen_on()

    def _receipt_arrived(self, receipt: Received) -> None:
        if (receipt.exchange, receipt.digest) != (self.name, self._own.digest):
            raise RemoteProtocolError("a receipt for another vector than ours")
        if not self.side.delivered:
            self._reading.count_sent(len(self._own.sent))
            self.side.delivered = True
        self._listen_on()

    def _listen_on(self) -> None:
        if self.side.is_final:
            self._listening.cancel()
