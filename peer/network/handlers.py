"""The base of every network: its streams, the gate for those from outside, and what runs behind it.

A stream's bytes are moved by a network's own class (libp2p.py, simulation/network.py). Alike in
both:

- Every byte is counted for its protocol, as it is handed on.
- Where the network has a pace (pacing.py), our own conversations keep to it. A sender that has not
  asked for a turn does not wait, so small messages are sent at once. Reading waits too, except for
  the messages of links. Relayed circuits are not paced here: what they carry is counted where it
  goes over our line (relay.py).
- The first reason why a stream is lost is the one that everybody is told.

The gate. Every conversation that another peer opens in one of our protocols passes it; libp2p's
own protocols do not, nor do streams that we open.

  1. A stream takes a place, of a budget (protocol/membership/book.py). One beyond a bound is closed
     at once and counted; the peer sees the stream end, and nobody else notices. So is one that
     comes through a relay where we hold no place, unless we are in conversation with its peer: a
     relay makes an identity look as if it came from wherever the relay is.
  2. Where a judge was given (`admit_by`), a peer that opens streams faster than any needs to waits
     for its turn, and meanwhile fills its own places.
  3. The judge refuses peers that are not admitted, or misbehave; one with a few faults waits. In
     the hello a peer shows that it may join, and is told why it may not (peer/daemon/links.py), so
     there only its conduct counts.
  4. What a peer sends against the rules is held against it here, whatever the conversation.

What goes wrong on one stream (a `LocoError`, one of trio's resource errors) ends that stream alone.
Anything else is a bug here. On a real network, where a stranger may have found it, it ends the
stream too, is counted, and is told of some peers, once for each; in a simulation it is not hidden.
"""

import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Final

import trio

from peer.runtime import Address, Judge, NetworkStatistics, OnBytes, PeerId, Stream, StreamHandler
from protocol.address.multiaddr import relay_of
from protocol.errors import LocalProtocolError, LocoError, RemoteProtocolError, StreamLost, leaves
from protocol.limits import INBOUND_PACE, INBOUND_STREAMS, READERS, Shares
from protocol.membership.book import Budget, Fault, Paces
from protocol.outcomes import RefusalReason
from protocol.wire.versions import HELLO, ROOT

from .conversation import Conversation
from .pacing import Pacing


# --- a stream to one peer -------------------------------------------------------------------------
class PeerStream(ABC):
    def __init__(
        self, network: "BaseNetwork", protocol: str, peer_id: PeerId, address: Address = ""
    ) -> None:
        self._network = network
        self._protocol = protocol
        self.remote_peer_id: Final = peer_id
        self.remote_address: Final = address
        self._pacing = network.pacing if protocol.startswith(ROOT) else None
        self._granted_bytes = 0
        self._held = b""
        self._lost: str | None = None
        self._closed = False
        network.streams[self] = None

    # --- for those who speak ----------------------------------------------------------------------
    async def turn(self, num_bytes: int) -> int:
        if self._pacing is None:
            return num_bytes
        with self._pacing.sending(self.remote_peer_id):
            granted_bytes = await self._pacing.turn(self.remote_peer_id, num_bytes)
        self._granted_bytes += granted_bytes
        return granted_bytes

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with memoryview(data) as whole, whole.cast("B") as view:
            pacing, granted_bytes = self._pacing, min(self._granted_bytes, len(view))
            self._granted_bytes -= granted_bytes
            if pacing is not None:
                pacing.sent(self.remote_peer_id, len(view) - granted_bytes)
            bulk = pacing.sending(self.remote_peer_id) if pacing and granted_bytes else None
            with bulk or nullcontext():
                self._check()
                await self._send_all(view)

    async def receive_some(self, max_bytes: int = 65536) -> bytes:
        if not self._held:
            self._check()
            self._held = await self._receive(max_bytes)
            self._count_received(len(self._held))
            if self._pacing is not None:
                self._pacing.received(self.remote_peer_id, len(self._held))
        await self._may_receive()  # who is cancelled here finds it next time
        data, self._held = self._held[:max_bytes], self._held[max_bytes:]
        return data

    async def receive_into(self, buffer: memoryview, arrived: OnBytes | None = None) -> None:
        with buffer.cast("B") as view:
            filled = held_bytes = min(len(self._held), len(view))
            view[:filled] = self._held[:filled]
            self._held = self._held[filled:]
            while filled < len(view):
                self._check()
                came = await self._receive_into(view, filled)
                self._count_received(came)
                filled += came
                if arrived is not None:
                    arrived(filled)
            if self._pacing is not None:
                self._pacing.received(self.remote_peer_id, len(view) - held_bytes)
        await self._may_receive()

    async def _may_receive(self) -> None:
        if self._pacing is not None and self._protocol != HELLO:
            await self._pacing.may_receive()

    def lose(self, reason: str) -> None:
        """Break the stream from outside: everybody who waits on it gets `StreamLost`."""
        self._lost = self._lost or reason
        self._break()

    @abstractmethod
    async def aclose(self) -> None: ...

    # --- for those that move the bytes ------------------------------------------------------------
    @abstractmethod
    async def _send_all(self, view: memoryview) -> None: ...

    @abstractmethod
    async def _receive(self, max_bytes: int) -> bytes: ...

    @abstractmethod
    async def _receive_into(self, view: memoryview, filled: int) -> int:
        """Read at least one byte behind those filled already; how many."""

    @abstractmethod
    def _break(self) -> None: ...

    def _count_sent(self, num_bytes: int) -> None:
        self._network.carried.sent_bytes[self._protocol] += num_bytes

    def _count_received(self, num_bytes: int) -> None:
        self._network.carried.received_bytes[self._protocol] += num_bytes

    def _note_closed(self) -> bool:
        """Note that the stream is closed. Returns whether it was open until now."""
        was_open, self._closed = not self._closed, True
        if was_open:
            del self._network.streams[self]
        return was_open

    def _check(self) -> None:
        if self._closed or self._lost:
            raise self._loss("")

    def _loss(self, reason: str) -> StreamLost:
        self._lost = self._lost or ("it was closed here" if self._closed else reason)
        return StreamLost(
            f"{self._protocol} stream with {self.remote_peer_id} was lost: {self._lost}"
        )


# --- the places of those that read from us --------------------------------------------------------
class Readers:
    """Places of those that read from us (book.py, rule 8)."""

    def __init__(self, shares: Shares = READERS) -> None:
        self._places = Budget(shares)

    async def serve(
        self, talk: Conversation, answer: Callable[[Conversation], Awaitable[None]]
    ) -> None:
        """Have a peer answered in a place of its own, or refuse it."""
        peer_id, address = talk.remote_peer_id, talk.remote_address
        if not self._places.has_room(peer_id, address):
            sentence = f"I serve {self._places.taken} readers already; ask another, or later"
            await talk.refuse(RefusalReason.TOO_MANY, sentence)
            return
        with self._places.held(peer_id, address):
            await answer(talk)


# --- what both networks are -----------------------------------------------------------------------

MAX_TOLD: Final = 8
"""Peers of which the same bug is told. A bug is a kind of error and a line of code, so there are as
many as there are, however many peers run into them."""

_STREAM_ERRORS: Final = (
    LocoError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.BusyResourceError,
    trio.EndOfChannel,
)


TellBug = Callable[[PeerId, str, BaseException], None]
"""Told of a bug that has ended a stream: peer, protocol, error."""


class BaseNetwork:
    """The base of every network: the protocols that it serves, its gate, and its counts.

    Attributes:
        tellers: are told of bugs; without one, bugs end everything.
        pacing: of our own conversations; streams that are open keep theirs.
        carried: as `statistics`, counted on.
        streams: the open ones, in the order in which they were opened.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, StreamHandler] = {}
        self._active = Budget(INBOUND_STREAMS)
        self._paces = Paces(*INBOUND_PACE)
        self._judge: Judge | None = None
        self._told: dict[tuple[object, ...], set[PeerId]] = {}
        self._announced: tuple[Address, ...] = ()
        self.tellers: list[TellBug] = []
        self.pacing: Pacing | None = None
        self.carried = NetworkStatistics(Counter(), Counter())
        self.streams: dict[PeerStream, None] = {}

    def statistics(self) -> NetworkStatistics:
        sent, received = dict(self.carried.sent_bytes), dict(self.carried.received_bytes)
        return replace(self.carried, sent_bytes=sent, received_bytes=received)

    def announce(self, addresses: Sequence[Address]) -> None:
        self._announced = tuple(addresses)

    def note_addresses(self, peer_id: PeerId, addresses: Sequence[Address]) -> None:
        """Do nothing, where peers are not dialled by addresses."""

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Serve a protocol. Raises LocalProtocolError: it is served already."""
        if protocol in self._handlers:
            raise LocalProtocolError(f"{protocol} is served already")
        self._handlers[protocol] = handler
        await trio.lowlevel.checkpoint()

    def admit_by(self, judge: Judge) -> None:
        self._judge = judge

    def would_serve(self, peer_id: PeerId) -> bool:
        """Whether the judge, where there is one, has nothing against a peer."""
        return self._judge is None or self._judge.refusal_of(peer_id) is None

    def has_room(self, protocol: str, peer_id: PeerId, address: Address) -> bool:
        """Whether to take in a stream of this peer, from there; one beyond a bound is counted."""
        if protocol not in self._handlers:
            return False
        has_room = self._active.has_room(peer_id, address) and self._leads_here(peer_id, address)
        self.carried.refused_streams += not has_room
        return has_room

    def _leads_here(self, peer_id: PeerId, address: Address) -> bool:
        """Whether this is not through a relay that we have never asked to lead anybody here."""
        relay = relay_of(address)
        known = relay is None or relay in map(relay_of, self._announced)
        return known or any(stream.remote_peer_id == peer_id for stream in self.streams)

    async def run(self, protocol: str, stream: Stream) -> None:
        """Let a stream that there is room for through the gate, serve it to its end, close it."""
        peer_id = stream.remote_peer_id
        try:
            with self._active.held(peer_id, stream.remote_address):
                try:
                    await self._judged(protocol, stream)
                except* _STREAM_ERRORS:
                    pass
        except Exception as bug:  # whatever it is: a stranger may have found it
            if not self.tellers:
                raise
            self._count_bug(protocol, peer_id, bug)
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()

    async def _judged(self, protocol: str, stream: Stream) -> None:
        judge, peer_id = self._judge, stream.remote_peer_id
        if judge is None:
            await self._handlers[protocol](stream)
            return
        if wait_s := self._paces.begin(trio.current_time(), peer_id, stream.remote_address):
            await trio.sleep(wait_s)
        decide = judge.conduct_refusal_of if protocol == HELLO else judge.refusal_of
        refusal = decide(peer_id)
        if refusal is not None:
            await Conversation(stream).refuse(refusal.reason, refusal.sentence)
            return
        if wait_s := judge.wait_s(peer_id):
            await trio.sleep(wait_s)
        try:
            await self._handlers[protocol](stream)
        except* RemoteProtocolError:
            judge.blame(peer_id, Fault.BROKEN_RULE)
            raise

    def _count_bug(self, protocol: str, peer_id: PeerId, bug: Exception) -> None:
        self.carried.failed_streams += 1
        for error in leaves(bug):
            lines = [(at.f_code, line) for at, line in traceback.walk_tb(error.__traceback__)]
            kind: tuple[object, ...] = (protocol, type(error).__name__, *lines[-1:])
            peers = self._told.setdefault(kind, set())
            if peer_id not in peers and len(peers) < MAX_TOLD:
                peers.add(peer_id)
                for tell in self.tellers:
                    tell(peer_id, protocol, error)


def print_bug(peer_id: PeerId, protocol: str, error: BaseException) -> None:
    ended = f"a stream of {peer_id} for {protocol} ended"
    error.add_note(f"loco-peer: this is a bug in loco-peer; please report it: {ended}")
    traceback.print_exception(error)
