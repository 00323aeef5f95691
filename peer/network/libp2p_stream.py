"""A libp2p stream as a trio stream.

p2pd pipes each stream through a unix connection of its own. Rules:

- A clean-looking end may be a truncation: p2pd ends the connection the same way whether the other
  side closed or vanished. Length and digest are the conversation's affair.
- When our own p2pd dies, every stream it carried is lost, however clean its end looks: the network
  calls `lose`, and an end of input is believed only once p2pd has shown that it is alive (a dying
  process closes its connections one after another).
- QUIC loses what was written just before a close (p2pd resets the stream). There, who has sent last
  waits until the other side closes, for LINGER_S at most; who has received last closes at once.
- A write that was cancelled half-way leaves the stream unusable; it is marked lost rather than left
  to corrupt what follows.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from peer.ports import Address, OnBytes, PeerId
from protocol.errors import StreamLost

from .conversation import WRITE_BYTES
from .handlers import Traffic

LINGER_S: Final = 3.0
SMALL_PIECE_BYTES: Final = 32 * 1024
GATHER_S: Final = 0.002
"""p2pd hands on what it gets in pieces of some KiB, and to wake up for each costs more than to move
it. While more than a small piece is missing, a small piece is followed by this pause."""


class Libp2pStream:
    """Implements `peer.ports.Stream`."""

    def __init__(
        self,
        connection: trio.SocketStream,
        remote_peer_id: PeerId,
        protocol: str,
        traffic: Traffic,
        carrier_is_lost: Callable[[], Awaitable[bool]],
        on_close: Callable[["Libp2pStream"], None],
        remote_address: Address = "",
        *,
        lingers: bool = False,
    ) -> None:
        self._connection = connection
        self.remote_peer_id: Final = remote_peer_id
        self.remote_address: Final = remote_address
        self._protocol = protocol
        self._traffic = traffic
        self._carrier_is_lost = carrier_is_lost
        self._on_close = on_close
        self._lingers = lingers
        self._sent_last = False
        self._lost: str | None = None
        self._closed = False
        traffic.open_streams += 1

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._lost or "open"
        return f"<Libp2pStream {self._protocol} with {self.remote_peer_id}: {state}>"

    async def turn(self, num_bytes: int) -> int:
        """Let all of it go: nothing is held back here."""
        return num_bytes

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; waits while the peer does not keep up.

        Raises:
            StreamLost
        """
        self._check()
        with memoryview(data) as whole, whole.cast("B") as view:
            if not view:
                await trio.lowlevel.checkpoint()
            for start in range(0, len(view), WRITE_BYTES):
                with view[start : start + WRITE_BYTES] as piece:
                    await self._send_piece(piece)

    async def _send_piece(self, piece: memoryview) -> None:
        try:
            await self._connection.send_all(piece)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise await self._loss_now("the peer closed the stream") from error
        except trio.Cancelled:
            self._lost = self._lost or "a write was cancelled half-way"
            raise
        self._sent_last = True
        self._traffic.count_sent(self._protocol, len(piece))

    async def receive_some(self, max_bytes: int = 65536) -> bytes:
        """At least one byte, or `b""` at the end.

        Raises:
            StreamLost
        """
        self._check()
        try:
            data = bytes(await self._connection.receive_some(max_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise await self._loss_now("the peer reset the stream") from error
        if not data and (self._lost or await self._carrier_is_lost()):
            raise self._loss("our p2pd died")
        self._sent_last = False
        self._traffic.count_received(self._protocol, len(data))
        return data

    async def receive_into(self, buffer: memoryview, arrived: OnBytes | None = None) -> None:
        """Fill `buffer`; `arrived` is told how much of it is there.

        Raises:
            StreamLost
        """
        self._check()
        with buffer.cast("B") as view:
            filled = 0
            while filled < len(view):
                came = await self._receive_piece(view[filled:], filled, len(view))
                filled += came
                if arrived is not None:
                    arrived(filled)
                if came < SMALL_PIECE_BYTES < len(view) - filled:
                    await trio.sleep(GATHER_S)

    async def _receive_piece(self, piece: memoryview, filled: int, wanted: int) -> int:
        with piece:
            try:
                num_bytes = await self._connection.socket.recv_into(piece)
            except (OSError, trio.ClosedResourceError) as error:
                raise await self._loss_now("the peer reset the stream") from error
        if not num_bytes:
            raise await self._loss_now(
                f"the peer closed the stream after {filled} of {wanted} bytes"
            )
        self._sent_last = False
        self._traffic.count_received(self._protocol, num_bytes)
        return num_bytes

    def lose(self, reason: str) -> None:
        """Break the stream from outside: everybody who waits on it gets `StreamLost`."""
        self._lost = self._lost or reason
        self._connection.socket.close()

    async def aclose(self) -> None:
        """Close the stream; what was sent still arrives. Does nothing the second time."""
        if not self._closed:
            self._closed = True
            self._traffic.open_streams -= 1
            self._on_close(self)
            try:
                if self._lingers and self._sent_last and not self._lost:
                    await self._linger()
            finally:
                await self._connection.aclose()
        await self._connection.aclose()

    async def _linger(self) -> None:
        """Wait until the other side closes; what still comes is nobody's any more."""
        try:
            with trio.move_on_after(LINGER_S):
                while await self._connection.receive_some(WRITE_BYTES):
                    pass
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            pass  # it has ended, or somebody else reads to the end

    def _check(self) -> None:
        if self._closed or self._lost:
            raise self._loss("")

    async def _loss_now(self, reason: str) -> StreamLost:
        """The error for a stream that just ended: `reason`, unless our own p2pd is to blame."""
        if not self._closed and not self._lost and await self._carrier_is_lost():
            reason = "our p2pd died"
        return self._loss(reason)

    def _loss(self, reason: str) -> StreamLost:
        if self._closed:
            reason = self._lost or "it was closed here"
        return StreamLost(
            f"{self._protocol} stream with {self.remote_peer_id} was lost: {self._lost or reason}"
        )
