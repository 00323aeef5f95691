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
from typing import TYPE_CHECKING, Final

import trio

from peer.ports import Address, PeerId
from protocol.errors import StreamLost

from .conversation import WRITE_BYTES
from .stream import PeerStream

if TYPE_CHECKING:
    from .handlers import BaseNetwork

LINGER_S: Final = 3.0
SMALL_PIECE_BYTES: Final = 32 * 1024
GATHER_S: Final = 0.002
"""p2pd hands on what it gets in pieces of some KiB, and to wake up for each costs more than to move
it. While more than a small piece is missing, a small piece is followed by this pause."""


class Libp2pStream(PeerStream):
    """A stream that p2pd carries."""

    def __init__(
        self,
        network: "BaseNetwork",
        protocol: str,
        peer_id: PeerId,
        address: Address,
        connection: trio.SocketStream,
        carrier_is_lost: Callable[[], Awaitable[bool]],
    ) -> None:
        super().__init__(network, protocol, peer_id, address)
        self._connection = connection
        self._carrier_is_lost = carrier_is_lost
        self._lingers = is_quic(address)
        self._sent_last = False
        self._came_bytes = 0

    async def _send_all(self, view: memoryview) -> None:
        if not view:
            await trio.lowlevel.checkpoint()
        for start in range(0, len(view), WRITE_BYTES):
            with view[start : start + WRITE_BYTES] as piece:
                try:
                    await self._connection.send_all(piece)
                except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    raise await self._loss_now("the peer closed the stream") from error
                except trio.Cancelled:
                    self._lost = self._lost or "a write was cancelled half-way"
                    raise
                self._sent_last = True
                self._count_sent(len(piece))

    async def _receive(self, max_bytes: int) -> bytes:
        try:
            data = bytes(await self._connection.receive_some(max_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise await self._loss_now("the peer reset the stream") from error
        if not data and (self._lost or await self._carrier_is_lost()):
            raise self._loss("our p2pd died")
        self._sent_last = False
        return data

    async def _receive_into(self, view: memoryview, filled: int) -> int:
        if filled and self._came_bytes < SMALL_PIECE_BYTES < len(view) - filled:
            await trio.sleep(GATHER_S)
        with view[filled:] as piece:
            try:
                self._came_bytes = await self._connection.socket.recv_into(piece)
            except (OSError, trio.ClosedResourceError) as error:
                raise await self._loss_now("the peer reset the stream") from error
        if not self._came_bytes:
            where = f"after {filled} of {len(view)} bytes"
            raise await self._loss_now(f"the peer closed the stream {where}")
        self._sent_last = False
        return self._came_bytes

    def _break(self) -> None:
        self._connection.socket.close()

    async def aclose(self) -> None:
        """Close the stream; what was sent still arrives. Does nothing the second time."""
        try:
            if self._note_closed() and self._lingers and self._sent_last and not self._lost:
                await self._linger()
        finally:
            await self._connection.aclose()

    async def _linger(self) -> None:
        """Wait until the other side closes; what still comes is nobody's any more."""
        try:
            with trio.move_on_after(LINGER_S):
                while await self._connection.receive_some(WRITE_BYTES):
                    pass
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            pass  # it has ended, or somebody else reads to the end

    async def _loss_now(self, reason: str) -> StreamLost:
        """The error for a stream that just ended: `reason`, unless our own p2pd is to blame."""
        if not self._closed and not self._lost and await self._carrier_is_lost():
            reason = "our p2pd died"
        return self._loss(reason)


def is_quic(address: Address) -> bool:
    """Whether an address is dialled over QUIC."""
    return "/quic-v1" in address
