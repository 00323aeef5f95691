"""A stream to one peer, alike over p2pd and in simulation: counted, paced, and lost for one reason.

A network's own class moves the bytes (libp2p.py, simulated_stream.py). Here stands what is
the same for both:

- Every byte is counted for its protocol, as it is handed on.
- Where the network has a pace (pacing.py), our own conversations keep to it. A sender that has not
  asked for a turn does not wait, so small messages are sent at once. Reading waits too, except for
  the messages of links. Relayed circuits are not paced here: what they carry is counted where it
  goes over our line (relay.py).
- The first reason why a stream is lost is the one that everybody is told.
"""

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from peer.ports import Address, OnBytes, PeerId
from protocol.errors import StreamLost
from protocol.wire.versions import HELLO, ROOT

if TYPE_CHECKING:
    from .handlers import BaseNetwork


class PeerStream(ABC):
    """Implements `peer.ports.Stream`, but for what moves the bytes."""

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
        network.carried.open_streams += 1

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._lost or "open"
        return f"<{type(self).__name__} {self._protocol} with {self.remote_peer_id}: {state}>"

    # --- for those who speak ----------------------------------------------------------------------
    async def turn(self, num_bytes: int) -> int:
        """Wait until bulk may go to this peer; how much of it may go now."""
        if self._pacing is None:
            return num_bytes
        with self._pacing.sending(self.remote_peer_id):
            granted_bytes = await self._pacing.turn(self.remote_peer_id, num_bytes)
        self._granted_bytes += granted_bytes
        return granted_bytes

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; waits while the peer does not keep up. Raises StreamLost."""
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
        """At least one byte, or `b""` at the end. Raises StreamLost."""
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
        """Fill `buffer`; `arrived` is told how much of it is there. Raises StreamLost."""
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
    async def aclose(self) -> None:
        """Close the stream; what was sent still arrives. Does nothing the second time."""

    # --- for those that move the bytes ------------------------------------------------------------
    @abstractmethod
    async def _send_all(self, view: memoryview) -> None: ...

    @abstractmethod
    async def _receive(self, max_bytes: int) -> bytes: ...

    @abstractmethod
    async def _receive_into(self, view: memoryview, filled: int) -> int:
        """Fill on behind what is filled already, by at least one byte; how many."""

    @abstractmethod
    def _break(self) -> None: ...

    def _count_sent(self, num_bytes: int) -> None:
        self._network.carried.sent_bytes[self._protocol] += num_bytes

    def _count_received(self, num_bytes: int) -> None:
        self._network.carried.received_bytes[self._protocol] += num_bytes

    def _note_closed(self) -> bool:
        """Whether it was open until now."""
        was_open, self._closed = not self._closed, True
        if was_open:
            del self._network.streams[self]
            self._network.carried.open_streams -= 1
        return was_open

    def _check(self) -> None:
        if self._closed or self._lost:
            raise self._loss("")

    def _loss(self, reason: str) -> StreamLost:
        self._lost = self._lost or ("it was closed here" if self._closed else reason)
        return StreamLost(
            f"{self._protocol} stream with {self.remote_peer_id} was lost: {self._lost}"
        )
