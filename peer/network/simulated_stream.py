"""Both ends of a simulated stream: two one-way pipes over two links.

The rules stand in simulated.py.

A pipe is passive: no task moves its bytes. Writer and reader compute from the clock what has left,
arrived and been taken, and sleep until the next moment at which that changes; `_announce` wakes
them when something else changes it.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from peer.ports import Address, OnBytes, PeerId
from protocol.errors import StreamLost

from .handlers import Traffic

# --- one direction between two simulated peers: when a segment leaves and arrives -----------------

RETRANSMIT_MIN_S: Final = 0.2
"""A lost segment costs this much, or a round trip if that is more."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """One direction between two peers.

    Attributes:
        latency_s: one way.
        jitter_s: up to so much more, evenly spread.
        bandwidth_bytes_per_s: shared by all streams of the link.
        loss: probability that a segment must be sent again.
    """

    latency_s: float = 0.02
    jitter_s: float = 0.0
    bandwidth_bytes_per_s: float = 12.5e6
    loss: float = 0.0

    def __post_init__(self) -> None:
        if min(self.latency_s, self.jitter_s) < 0 or self.bandwidth_bytes_per_s <= 0:
            raise ValueError(f"not a link: {self}")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss must be in [0, 1): {self}")


class LinkWatcher(Protocol):
    """A watcher that hears when a link is cut or carries again."""

    def link_cut(self) -> None: ...
    def link_mended(self, cut_since_s: float) -> None: ...


class SimulatedLink:
    """The state of one direction between two peers."""

    def __init__(self, model: LinkModel, seed: bytes) -> None:
        self.model = model
        self.watchers: dict[LinkWatcher, None] = {}
        self.cut_since_s: float | None = None
        """When the link was cut; None while it carries."""
        self._random = random.Random(seed)
        self._busy_until_s = 0.0

    def schedule(self, num_bytes: int) -> tuple[float, float]:
        """Take the link for a segment: when it has left, and when it arrives."""
        model = self.model
        start_s = max(trio.current_time(), self._busy_until_s)
        self._busy_until_s = start_s + num_bytes / model.bandwidth_bytes_per_s
        delay_s = model.latency_s + model.jitter_s * self._random.random()
        while model.loss and self._random.random() < model.loss:
            delay_s += max(RETRANSMIT_MIN_S, 2 * model.latency_s)
        return self._busy_until_s, self._busy_until_s + delay_s

    def cut(self) -> None:
        """Let nothing pass."""
        if self.cut_since_s is None:
            self.cut_since_s = trio.current_time()
            for watcher in list(self.watchers):
                watcher.link_cut()

    def mend(self) -> None:
        """Let everything pass again."""
        cut_since_s, self.cut_since_s = self.cut_since_s, None
        if cut_since_s is not None:
            for watcher in list(self.watchers):
                watcher.link_mended(cut_since_s)


# --- simulated stream -----------------------------------------------------------------------------

SEGMENT_BYTES: Final = 64 * 1024
WINDOW_BYTES: Final = 6 * 1024 * 1024
"""Most bytes of one direction of a stream that its reader has not taken; what p2pd was measured to
allow."""
SILENCE_LIMIT_S: Final = 45.0
"""A stream on a link that has been cut for so long breaks."""


@dataclass(slots=True)
class _Segment:
    """Bytes on their way."""

    left_s: float
    arrives_s: float
    data: memoryview


class _Pipe:
    """One direction of a stream.

    `credit_delay_s` is how long news of a read takes back to the writer.
    """

    def __init__(self, link: SimulatedLink, credit_delay_s: float) -> None:
        self._link = link
        self._credit_delay_s = credit_delay_s
        self._segments: deque[_Segment] = deque()
        self._held_bytes = 0
        self._credits: deque[tuple[float, int]] = deque()
        self._last_arrival_s = 0.0
        self._ends_s = math.inf
        self._reader_gone_s = math.inf
        self._changed = trio.Event()
        link.watchers[self] = None

    # --- the writer's side ------------------------------------------------------------------------

    async def send(self, data: memoryview, check: Callable[[], None]) -> None:
        """Send one segment; returns when it has left.

        `check` raises when the stream was broken meanwhile.

        Raises:
            StreamLost: the reader is gone, or the link was cut for too long.
        """
        await self._wait_room(len(data), check)
        left_s, arrives_s = self._link.schedule(len(data))
        self._last_arrival_s = max(self._last_arrival_s, arrives_s)
        self._segments.append(_Segment(left_s, self._last_arrival_s, memoryview(bytes(data))))
        self._held_bytes += len(data)
        self.announce()
        await trio.sleep_until(left_s)
        check()

    async def _wait_room(self, num_bytes: int, check: Callable[[], None]) -> None:
        while True:
            check()
            now_s = trio.current_time()
            if now_s >= self._reader_gone_s:
                raise StreamLost("the peer closed the stream")
            while self._credits and self._credits[0][0] <= now_s:
                self._held_bytes -= self._credits.popleft()[1]
            if self._held_bytes + num_bytes <= WINDOW_BYTES:
                return
            room_s = self._credits[0][0] if self._credits else math.inf
            await self._wait_until(min(room_s, self._reader_gone_s))

    def end(self, *, abruptly: bool = False) -> None:
        """End the direction. Abruptly: what has not left yet never will."""
        now_s = trio.current_time()
        while abruptly and self._segments and self._segments[-1].left_s > now_s:
            self._segments.pop()
        if self._ends_s == math.inf:
            arrived_s = self._segments[-1].arrives_s if self._segments else 0.0
            self._ends_s = max(arrived_s, now_s + self._link.model.latency_s)
        self.announce()

    # --- the reader's side ------------------------------------------------------------------------

    async def receive(self, max_bytes: int, check: Callable[[], None]) -> memoryview:
        """Some bytes that have arrived, waiting for them; empty at the end.

        Raises:
            StreamLost: the link was cut for too long.
        """
        while True:
            check()
            next_s = self._segments[0].arrives_s if self._segments else self._ends_s
            cut_s = self._link.cut_since_s
            if next_s <= (trio.current_time() if cut_s is None else cut_s):
                return self._take(max_bytes) if self._segments else memoryview(b"")
            await self._wait_until(next_s if cut_s is None else math.inf)

    def _take(self, max_bytes: int) -> memoryview:
        segment = self._segments[0]
        piece, segment.data = segment.data[:max_bytes], segment.data[max_bytes:]
        if not segment.data:
            self._segments.popleft()
        self._credits.append((trio.current_time() + self._credit_delay_s, len(piece)))
        self.announce()
        return piece

    def leave(self) -> None:
        """The reader is gone; the writer hears of it one latency later."""
        self._reader_gone_s = min(self._reader_gone_s, trio.current_time() + self._credit_delay_s)
        self.announce()

    # --- both -------------------------------------------------------------------------------------

    async def _wait_until(self, time_s: float) -> None:
        """Wait until this time, or until something changes.

        Raises:
            StreamLost: the link was cut for too long.
        """
        cut_s = self._link.cut_since_s
        silent_s = math.inf if cut_s is None else cut_s + SILENCE_LIMIT_S
        if trio.current_time() >= silent_s:
            raise StreamLost(f"nothing was heard for {SILENCE_LIMIT_S:.0f} s")
        with trio.move_on_at(min(time_s, silent_s)):
            await self._changed.wait()

    def link_cut(self) -> None:
        """Wake up all that wait: they count the silence from now on."""
        self.announce()

    def link_mended(self, cut_since_s: float) -> None:
        """Send again what was held up: it arrives one latency from now, at the earliest."""
        earliest_s = trio.current_time() + self._link.model.latency_s
        for segment in self._segments:
            if segment.arrives_s > cut_since_s:
                segment.arrives_s = max(segment.arrives_s, earliest_s)
        self._last_arrival_s = max(self._last_arrival_s, earliest_s)
        if self._ends_s > cut_since_s:
            self._ends_s = max(self._ends_s, earliest_s)
        self.announce()

    def forget_link(self) -> None:
        """Stop watching the link: nothing waits here any more."""
        self._link.watchers.pop(self, None)

    def announce(self) -> None:
        """Let writer and reader look again."""
        self._changed.set()
        self._changed = trio.Event()


class SimulatedStream:
    """Implements `peer.ports.Stream`. Made in pairs by `open_pair`."""

    def __init__(
        self,
        protocol: str,
        remote_peer_id: PeerId,
        traffic: Traffic,
        incoming: _Pipe,
        outgoing: _Pipe,
        remote_address: Address = "",
    ) -> None:
        self._protocol = protocol
        self.remote_peer_id: Final = remote_peer_id
        self.remote_address: Final = remote_address
        self._traffic = traffic
        self._incoming = incoming
        self._outgoing = outgoing
        self._lost: str | None = None
        self._closed = False
        self._sending = False
        self.on_close: Callable[[SimulatedStream], None] = lambda _stream: None
        traffic.open_streams += 1

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._lost or "open"
        return f"<SimulatedStream {self._protocol} with {self.remote_peer_id}: {state}>"

    async def turn(self, num_bytes: int) -> int:
        """Let all of it go: nothing is held back here."""
        return num_bytes

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; waits for the link, and while the peer does not keep up.

        Raises:
            StreamLost
        """
        self._check()
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            with memoryview(data) as whole, whole.cast("B") as view:
                await trio.lowlevel.checkpoint()
                for start in range(0, len(view), SEGMENT_BYTES):
                    await self._send_segment(view[start : start + SEGMENT_BYTES])
        finally:
            self._sending = False

    async def _send_segment(self, segment: memoryview) -> None:
        with segment:
            try:
                await self._outgoing.send(segment, self._check)
            except trio.Cancelled:
                self._lost = self._lost or "a write was cancelled half-way"
                raise
            except StreamLost as error:
                raise self._loss(str(error)) from error
            self._traffic.count_sent(self._protocol, len(segment))

    async def receive_some(self, max_bytes: int = 65536) -> bytes:
        """At least one byte, or `b""` at the end.

        Raises:
            StreamLost
        """
        return bytes(await self._receive(max_bytes))

    async def receive_into(self, buffer: memoryview, arrived: OnBytes | None = None) -> None:
        """Fill `buffer`; `arrived` is told how much of it is there.

        Raises:
            StreamLost
        """
        with buffer.cast("B") as view:
            filled = 0
            while filled < len(view):
                piece = await self._receive(len(view) - filled)
                if not piece:
                    raise self._loss(
                        f"the peer closed the stream after {filled} of {len(view)} bytes"
                    )
                view[filled : filled + len(piece)] = piece
                filled += len(piece)
                if arrived is not None:
                    arrived(filled)

    async def _receive(self, max_bytes: int) -> memoryview:
        self._check()
        await trio.lowlevel.checkpoint()
        try:
            piece = await self._incoming.receive(max_bytes, self._check)
        except StreamLost as error:
            raise self._loss(str(error)) from error
        self._traffic.count_received(self._protocol, len(piece))
        return piece

    def lose(self, reason: str) -> None:
        """Break the stream from outside: waiters get `StreamLost`, the other end sees it end."""
        if self._lost is None:
            self._lost = reason
        self._part(abruptly=True)

    def close(self) -> None:
        """Close the stream; what was sent still arrives. Does nothing the second time."""
        if not self._closed:
            self._closed = True
            self._traffic.open_streams -= 1
            self._part(abruptly=self._lost is not None)
            self.on_close(self)

    async def aclose(self) -> None:
        """Close the stream, as `close` does."""
        self.close()
        await trio.lowlevel.checkpoint()

    def _part(self, *, abruptly: bool) -> None:
        self._outgoing.end(abruptly=abruptly)
        self._incoming.leave()
        self._incoming.forget_link()

    def _check(self) -> None:
        if self._closed or self._lost:
            raise self._loss("it was closed here")

    def _loss(self, reason: str) -> StreamLost:
        self._lost = self._lost or reason
        return StreamLost(
            f"{self._protocol} stream with {self.remote_peer_id} was lost: {self._lost}"
        )


def open_pair(
    protocol: str,
    peers: tuple[PeerId, PeerId],
    links: tuple[SimulatedLink, SimulatedLink],
    traffics: tuple[Traffic, Traffic],
    opener_address: Address = "",
) -> tuple[SimulatedStream, SimulatedStream]:
    """Both ends of a new stream. `links` leads from the first peer to the second, and back."""
    there = _Pipe(links[0], links[1].model.latency_s)
    back = _Pipe(links[1], links[0].model.latency_s)
    return (
        SimulatedStream(protocol, peers[1], traffics[0], back, there),
        SimulatedStream(protocol, peers[0], traffics[1], there, back, opener_address),
    )
