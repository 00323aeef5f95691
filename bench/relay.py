"""A long, thin link between two processes of one machine: a TCP relay that delays and paces.

Idea. The relay joins each connection that it takes with a target; bytes pass through a model of the
link, one for each direction, shared by all connections of the relay:

    leaves  = max(now, leaves of the bytes before) + size / rate     the wire is serial
    arrives = leaves + one-way delay

Rules:
- Nothing is lost and nothing overtakes. Reading stops while bytes wait longer than QUEUE_S for the
  wire, so the relay holds at most rate * (one-way delay + QUEUE_S) of each direction: more than the
  link itself, and bounded. The sender feels the rest through TCP's own back-pressure.
- Bytes are passed on in pieces of about PIECE_S of the wire, so that they drip as from a real link.
- The relay's sockets have small kernel buffers: what waits should wait in the sender.

What it does not show: loss, and the window of a real TCP connection. Each half of a relayed
connection is local, so no kernel buffer limits what is in flight, as `tcp_wmem` and `tcp_rmem` do
on a real link of a large bandwidth-delay product.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

import trio

from .children import Answer, answer_parent

QUEUE_S: Final = 0.02
PIECE_S: Final = 0.001
MIN_PIECE_BYTES: Final = 16 * 1024
MAX_PIECE_BYTES: Final = 256 * 1024
SOCKET_BUFFER_BYTES: Final = 512 * 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of the link, the same in both directions."""

    bits_per_s: float
    round_trip_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.bits_per_s / 8

    @property
    def bytes_in_flight(self) -> float:
        """Bandwidth-delay product."""
        return self.bytes_per_s * self.round_trip_s

    @property
    def piece_bytes(self) -> int:
        return int(min(max(self.bytes_per_s * PIECE_S, MIN_PIECE_BYTES), MAX_PIECE_BYTES))

    def describe(self) -> str:
        return f"{self.bits_per_s / 1e6:g} Mbit/s, {1e3 * self.round_trip_s:g} ms"


class Wire:
    """One direction of the link."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._busy_until_s = -math.inf
        self.carried_bytes = 0

    def carry(self, now_s: float, num_bytes: int) -> tuple[float, float]:
        """Take the wire for some bytes; when more may be read, and when these arrive."""
        leaves_s = max(now_s, self._busy_until_s) + num_bytes / self._shape.bytes_per_s
        self._busy_until_s = leaves_s
        self.carried_bytes += num_bytes
        return leaves_s - QUEUE_S, leaves_s + self._shape.round_trip_s / 2


class Way:
    """One direction of one connection: what has left and not yet arrived."""

    def __init__(
        self, wire: Wire, piece_bytes: int, source: trio.SocketStream, sink: trio.SocketStream
    ) -> None:
        self._wire = wire
        self._piece_bytes = piece_bytes
        self._source = source
        self._sink = sink
        self._held: deque[tuple[float, bytes]] = deque()
        self._came = trio.Event()

    async def run(self) -> None:
        """Carry everything until the source ends, then end the sink."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._deliver)
            await self._take()

    async def _take(self) -> None:
        data = b" "
        while data:
            try:
                data = bytes(await self._source.receive_some(self._piece_bytes))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            go_on_s, arrives_s = self._wire.carry(trio.current_time(), len(data))
            self._held.append((arrives_s, data))
            self._came.set()
            if go_on_s > trio.current_time():
                await trio.sleep_until(go_on_s)

    async def _deliver(self) -> None:
        data = b" "
        while data:
            while not self._held:
                self._came = trio.Event()
                await self._came.wait()
            arrives_s, data = self._held.popleft()
            await trio.sleep_until(arrives_s)
            try:
                await (self._sink.send_all(data) if data else self._sink.send_eof())
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await trio.aclose_forcefully(self._source)
                return


class Relay:
    """Connections through one link. `there` leads from the client to the target."""

    def __init__(self, shape: Shape, target_port: int) -> None:
        self._shape = shape
        self._target_port = target_port
        self.there, self.back = Wire(shape), Wire(shape)

    async def carry(self, near: trio.SocketStream) -> None:
        """One connection, from beginning to end."""
        far = await trio.open_tcp_stream("127.0.0.1", self._target_port)
        async with near, far:
            far.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, _BUFFER)
            for stream in (near, far):
                stream.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, _BUFFER)
            async with trio.open_nursery() as nursery:
                piece_bytes = self._shape.piece_bytes
                nursery.start_soon(Way(self.there, piece_bytes, near, far).run)
                nursery.start_soon(Way(self.back, piece_bytes, far, near).run)


_BUFFER: Final = SOCKET_BUFFER_BYTES


async def main() -> None:
    """Relay for a parent process (children.py): `open`, then `carried_bytes`."""
    relays: list[Relay] = []
    async with trio.open_nursery() as nursery:

        async def open_relay(question: Answer) -> Answer:
            shape = Shape(question["bits_per_s"], question["round_trip_s"])
            relay = Relay(shape, question["target_port"])
            relays.append(relay)
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            for listener in listeners:
                # What is accepted inherits it; it bounds the window from the start.
                listener.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, _BUFFER)
            nursery.start_soon(trio.serve_listeners, relay.carry, listeners)
            return {"port": listeners[0].socket.getsockname()[1]}

        async def carried_bytes(_: Answer) -> Answer:
            return {"bytes": sum(r.there.carried_bytes + r.back.carried_bytes for r in relays)}

        await answer_parent({"open": open_relay, "carried_bytes": carried_bytes})
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
