"""The Stream port over trio's streams in memory; one of them may stop before one of its awaits."""

import math
from typing import Any

import trio
import trio.testing

from peer.runtime import OnBytes
from protocol.errors import StreamLost

OTHER = "12D3KooWOther"


class PipeStream:
    """One end of a pipe.

    Attributes:
        awaits: sends and receives so far.
        stop_at: the last of them that goes through; it hangs in the next, and sets `stopped`.
    """

    def __init__(
        self,
        stream: trio.StapledStream[Any, Any],
        remote_peer_id: str = OTHER,
        stop_at: float = math.inf,
    ) -> None:
        self.remote_peer_id = remote_peer_id
        self.remote_address = ""
        self.awaits = 0
        self.stop_at = stop_at
        self.stopped = trio.Event()
        self._stream = stream

    async def _count(self) -> None:
        self.awaits += 1
        if self.awaits > self.stop_at:
            self.stopped.set()
            await trio.sleep_forever()

    async def turn(self, num_bytes: int) -> int:
        await self._count()
        return num_bytes

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._count()
        await self._stream.send_all(bytes(data))

    async def receive_some(self, max_bytes: int = 65536) -> bytes:
        await self._count()
        return bytes(await self._stream.receive_some(max_bytes))

    async def receive_into(self, buffer: memoryview, arrived: OnBytes | None = None) -> None:
        done = 0
        while done < len(buffer):
            data = await self.receive_some(len(buffer) - done)
            if not data:
                raise StreamLost("the stream ended")
            buffer[done : done + len(data)] = data
            done += len(data)
            if arrived is not None:
                arrived(done)

    async def aclose(self) -> None:
        await self._stream.aclose()


def pipe(near: str = OTHER, far: str = OTHER) -> tuple[PipeStream, PipeStream]:
    """The ends of two peers: the near one's, then the far one's."""
    one, other = trio.testing.memory_stream_pair()
    return PipeStream(one, far), PipeStream(other, near)
