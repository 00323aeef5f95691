"""A network whose streams are paced (pacing.py); it wraps a real or a simulated network.

A sender that has not asked for a turn does not wait, so small messages are sent at once. Reading
waits too, except for the messages of links.
"""

from contextlib import nullcontext

from peer.ports import Network, OnBytes, Stream
from protocol.wire.versions import HELLO

from .pacing import Pacing
from .wrapped import WrappedNetwork, WrappedStream


class PacedNetwork(WrappedNetwork):
    """The network whose streams keep to the pace."""

    def __init__(self, network: Network, pacing: Pacing) -> None:
        super().__init__(network)
        self._pacing = pacing

    def _wrapped(self, stream: Stream, protocol: str) -> Stream:
        return PacedStream(stream, self._pacing, reads_slowly=protocol != HELLO)


class PacedStream(WrappedStream[Stream]):
    """One stream at the pace of its peer and of the line.

    Args:
        reads_slowly: to keep to the download limit.
    """

    def __init__(self, stream: Stream, pacing: Pacing, *, reads_slowly: bool) -> None:
        super().__init__(stream)
        self._pacing = pacing
        self._reads_slowly = reads_slowly
        self._granted_bytes = 0
        self._held = b""

    async def turn(self, num_bytes: int) -> int:
        """Wait until bulk may go to this peer; how much of it may go now."""
        with self._pacing.sending(self.remote_peer_id):
            granted_bytes = await self._pacing.turn(self.remote_peer_id, num_bytes)
        self._granted_bytes += granted_bytes
        return granted_bytes

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data` now; raises StreamLost."""
        granted_bytes = min(self._granted_bytes, len(data))
        self._granted_bytes -= granted_bytes
        self._pacing.sent(self.remote_peer_id, len(data) - granted_bytes)
        with self._pacing.sending(self.remote_peer_id) if granted_bytes else nullcontext():
            await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int = 65536) -> bytes:
        """At least one byte, or `b""` at the end; raises StreamLost."""
        if not self._held:
            self._held = await self._stream.receive_some(max_bytes)
            self._pacing.received(self.remote_peer_id, len(self._held))
        await self._may_receive()  # who is cancelled here finds it next time
        data, self._held = self._held[:max_bytes], self._held[max_bytes:]
        return data

    async def receive_into(self, buffer: memoryview, arrived: OnBytes | None = None) -> None:
        """Fill `buffer`; `arrived` is told how much of it is there. Raises StreamLost."""
        held_bytes = min(len(self._held), len(buffer))
        buffer[:held_bytes] = self._held[:held_bytes]
        self._held = self._held[held_bytes:]
        tell = None if arrived is None else lambda num_bytes: arrived(held_bytes + num_bytes)
        await self._stream.receive_into(buffer[held_bytes:], tell)
        self._pacing.received(self.remote_peer_id, len(buffer) - held_bytes)
        await self._may_receive()

    async def _may_receive(self) -> None:
        if self._reads_slowly:
            await self._pacing.may_receive()
