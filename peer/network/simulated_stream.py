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
from typing import TYPE_CHECKING, Final

import trio
from trio.lowlevel import ParkingLot

from peer.ports import Address, PeerId
from protocol.errors import StreamLost

from .stream import PeerStream

if TYPE_CHECKING:
    from .handlers import BaseNetwork

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


class SimulatedLink:
    """The state of one direction between two peers."""

    def __init__(self, model: LinkModel, seed: bytes) -> None:
        self.model = model
        self.watchers: dict[_Pipe, None] = {}
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
                watcher.announce()  # all that wait count the silence from now on

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
        self._changed = ParkingLot()
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
            await self._changed.park()

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
        self._changed.unpark_all()


class SimulatedStream(PeerStream):
    """One end of a stream. Made in pairs by `open_pair`."""

    def __init__(
        self,
        network: "BaseNetwork",
        protocol: str,
        peer_id: PeerId,
        address: Address,
        incoming: _Pipe,
        outgoing: _Pipe,
    ) -> None:
        super().__init__(network, protocol, peer_id, address)
        self._incoming = incoming
        self._outgoing = outgoing
        self._sending = False

    async def _send_all(self, view: memoryview) -> None:
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
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
            self._count_sent(len(segment))

    async def _receive(self, max_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        try:
            return bytes(await self._incoming.receive(max_bytes, self._check))
        except StreamLost as error:
            raise self._loss(str(error)) from error

    async def _receive_into(self, view: memoryview, filled: int) -> int:
        piece = await self._receive(len(view) - filled)
        if not piece:
            where = f"after {filled} of {len(view)} bytes"
            raise self._loss(f"the peer closed the stream {where}")
        view[filled : filled + len(piece)] = piece
        return len(piece)

    def _break(self) -> None:
        self._part(abruptly=True)

    def close(self) -> None:
        """Close the stream, at once."""
        if self._note_closed():
            self._part(abruptly=self._lost is not None)

    async def aclose(self) -> None:
        """Close the stream; what was sent still arrives. Does nothing the second time."""
        self.close()
        await trio.lowlevel.checkpoint()

    def _part(self, *, abruptly: bool) -> None:
        self._outgoing.end(abruptly=abruptly)
        self._incoming.leave()
        self._incoming.forget_link()


def open_pair(
    protocol: str,
    networks: "tuple[BaseNetwork, BaseNetwork]",
    peers: tuple[PeerId, PeerId],
    links: tuple[SimulatedLink, SimulatedLink],
    opener_address: Address,
) -> tuple[SimulatedStream, SimulatedStream]:
    """Both ends of a new stream. `links` leads from the first peer to the second, and back."""
    there = _Pipe(links[0], links[1].model.latency_s)
    back = _Pipe(links[1], links[0].model.latency_s)
    return (
        SimulatedStream(networks[0], protocol, peers[1], "", back, there),
        SimulatedStream(networks[1], protocol, peers[0], opener_address, there, back),
    )
