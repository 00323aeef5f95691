"""The same bytes both ways on bare streams: what the exchange is compared with.

The codes are cut evenly over so many streams. Each stream carries its range both ways at once,
straight out of one buffer and into another, and one byte of receipt behind it; there is no framing,
no digest and no check.
"""

import struct
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from protocol.errors import LocoError

WRITE_BYTES: Final = 256 * 1024
_RANGE: Final = struct.Struct("<QQ")


class Bytes(Protocol):
    """A stream of bytes: p2pd's and TCP's are used alike."""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None: ...
    async def receive_into(self, buffer: memoryview) -> None: ...
    async def aclose(self) -> None: ...


class TcpBytes:
    """A TCP connection of trio's, read straight into a buffer."""

    def __init__(self, connection: trio.SocketStream) -> None:
        self._connection = connection

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._connection.send_all(data)

    async def receive_into(self, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            num_bytes = await self._connection.socket.recv_into(buffer[filled:])
            if not num_bytes:
                raise EOFError(f"ended after {filled} of {len(buffer)} bytes")
            filled += num_bytes

    async def aclose(self) -> None:
        await self._connection.aclose()


@dataclass(frozen=True, slots=True)
class Buffers:
    """The bytes that go out, and the place of those that come in; of one length."""

    out: memoryview
    into: memoryview


async def begin_swap(stream: Bytes, buffers: Buffers, start: int, stop: int) -> None:
    """Swap one range on a stream that we opened."""
    await stream.send_all(_RANGE.pack(start, stop))
    await _swap(stream, buffers, start, stop)


async def answer_swap(stream: Bytes, buffers: Buffers) -> None:
    """Swap the range that the opener of the stream wants."""
    head = bytearray(_RANGE.size)
    await stream.receive_into(memoryview(head))
    await _swap(stream, buffers, *_RANGE.unpack(head))
    try:
        await stream.receive_into(memoryview(bytearray(1)))  # whoever opened it closes first
    except (EOFError, LocoError):
        pass


async def swap_all(streams: list[Bytes], buffers: Buffers) -> float:
    """Swap everything over streams that we opened; how long it took, in seconds."""
    began_s = trio.current_time()
    total = len(buffers.out)
    async with trio.open_nursery() as nursery:
        for index, stream in enumerate(streams):
            start, stop = (total * i // len(streams) for i in (index, index + 1))
            nursery.start_soon(begin_swap, stream, buffers, start, stop)
    return trio.current_time() - began_s


async def _swap(stream: Bytes, buffers: Buffers, start: int, stop: int) -> None:
    arrived = trio.Event()

    async def send() -> None:
        for at in range(start, stop, WRITE_BYTES):
            await stream.send_all(buffers.out[at : min(at + WRITE_BYTES, stop)])
        await arrived.wait()
        await stream.send_all(b"r")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await stream.receive_into(buffers.into[start:stop])
        arrived.set()
        await stream.receive_into(memoryview(bytearray(1)))


async def echo_times(stream: Bytes, message: bytes, rounds: int) -> list[float]:
    """Send a message and wait for its echo, again and again; how long each took, in seconds."""
    answer = memoryview(bytearray(len(message)))
    times_s = []
    for _ in range(rounds):
        began_s = trio.current_time()
        await stream.send_all(message)
        await stream.receive_into(answer)
        times_s.append(trio.current_time() - began_s)
    return times_s


async def echo(stream: Bytes, num_bytes: int, rounds: int) -> None:
    """Answer `echo_times`."""
    message = memoryview(bytearray(num_bytes))
    for _ in range(rounds):
        await stream.receive_into(message)
        await stream.send_all(message)
