"""The pace of bytes that leave and come: limits of this machine, of the others, and of the path.

Idea. A peer that sends bulk asks for a turn first, piece by piece. Small messages never wait, but
they count, so bulk makes room for them.

Rules
  1. `max_upload_mbps` and `max_download_mbps` are what the network interface shall carry. We see
     the bytes of our streams only; what encryption, multiplexing and TCP/IP add to them, and the
     acknowledgements that go the other way, is charged by a factor.
  2. Whatever has left a sender arrives at the speed of the line: by reading slowly we can only fill
     the buffers on the way. So a peer with a download limit tells each of the others how much it
     may send, and they keep to it. It reads slowly too, for those that do not.
  3. Bulk to a peer goes at most at the rate that `LinkRate` finds for the path, and at the one that
     senders of short bulk have measured (`measured`).
  4. Turns are taken in the order in which they were asked for.

The rate of a path. All streams to a peer share one connection. Bulk that is written faster than the
path carries it waits in the buffers of kernel and routers, and every small message waits behind it.
What the path carries only the receiver can tell: with each beat it says how much it has received so
far. (The cycle of paces is that of BBR: Cardwell et al., ACM Queue 14(5), 2016; a second takes the
place of a round trip.)
  5. A sample is what the peer received between two of its beats, by its own clock. It counts when
     we had bulk for it during all of that time, and of the sample before: otherwise it tells of us,
     and of bytes that had not arrived yet, not of the path.
  6. A sample clearly below our pace is what the path carries, and goes into the estimate. One
     clearly above the estimate takes its place. Any other tells nothing new.
  7. Until there are FIRST samples bulk is not held back; what has heaped up by then is drained.
     From then on bulk goes at a little less than the estimate; every `len(GAINS)` samples it goes
     faster for one, to see whether there is more, and for as long as there is; and slower for the
     next, to drain again.
  8. Above UNPACED_BYTES_PER_S nothing is held back: buffers empty faster than anybody notices.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import trio
from trio.lowlevel import ParkingLot

from peer.runtime import PeerId
from protocol.limits import MAX_MEMBERS, forget_oldest

WIRE_FACTOR: Final = 1.06
"""Bytes on the interface for one byte of a stream: TLS, yamux, TCP/IP and Ethernet headers."""
ACKNOWLEDGEMENTS: Final = 0.025
"""Bytes on the interface in the other direction for one byte of a stream."""
BURST_S: Final = 0.05
"""Idle time of the link that may be made up for."""
LOAD_S: Final = 60.0
"""Over which the load of the line is averaged."""
TURN_BYTES: Final = 16 * 1024
TURN_S: Final = 0.01
"""Where a rate is kept, a turn lets through what goes in this time, or TURN_BYTES if more."""


@dataclass(frozen=True, slots=True)
class BandwidthLimits:
    """Limits of the network interface, in megabits per second; None for no limit."""

    max_upload_mbps: float | None = None
    max_download_mbps: float | None = None


NO_LIMITS: Final = BandwidthLimits()


class Bucket:
    """A rate (infinite: none to keep), and the queue of those that wait for their turn."""

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        self.bytes_per_s = bytes_per_s
        self._clear_s = -math.inf
        self._load, self._charged_s = 0.0, -math.inf
        self._lock = trio.Lock()
        self._rate_changed = ParkingLot()

    @property
    def is_bound(self) -> bool:
        return self.bytes_per_s < math.inf

    def change_rate(self, bytes_per_s: float) -> None:
        """Change the rate; what was charged and has not had its time goes at the new one too."""
        now_s = trio.current_time()
        if self.is_bound and self._clear_s > now_s:
            left_bytes = (self._clear_s - now_s) * self.bytes_per_s
            self._clear_s = now_s + left_bytes / bytes_per_s
        if bytes_per_s != self.bytes_per_s:
            self.bytes_per_s = bytes_per_s
            self._rate_changed.unpark_all()

    def charge(self, num_bytes: float) -> None:
        if self.is_bound:
            begin_s = max(self._clear_s, trio.current_time() - BURST_S)
            self._clear_s = begin_s + num_bytes / self.bytes_per_s
            self._load = self.load + num_bytes / self.bytes_per_s / LOAD_S
            self._charged_s = trio.current_time()

    @property
    def load(self) -> float:
        """Share of the rate that was charged recently; 0 where there is no rate to keep."""
        return self._load * math.exp((self._charged_s - trio.current_time()) / LOAD_S)

    async def wait_clear(self) -> None:
        """Wait until all that was charged has had its time."""
        while self.is_bound and trio.current_time() < self._clear_s:
            with trio.move_on_at(self._clear_s):
                await self._rate_changed.park()

    async def turn(self, num_bytes: float) -> None:
        if not self.is_bound:
            return
        async with self._lock:
            await self.wait_clear()
            self.charge(num_bytes)


# --- how fast bulk may go to a peer ---------------------------------------------------------------
FIRST: Final = 3
FASTER, DRAIN, CRUISE = 1.25, 0.6, 0.94
GAINS: Final = (FASTER, DRAIN, *[CRUISE] * 10)
"""Rule 7; the mean is 0.94."""
CLEARLY: Final = 0.1
"""Part of our pace, or of the estimate, by which a sample clearly differs from it (rule 6)."""
NEWEST: Final = 0.5
"""Share of a sample in the estimate (rule 6)."""
BUSY: Final = 0.9
"""Part of the time for which there must have been bulk (rule 5)."""
SAMPLE_MIN_S: Final = 0.5
SAMPLE_MAX_S: Final = 5.0
LEAST_BYTES_PER_S: Final = 125_000.0
UNPACED_BYTES_PER_S: Final = 62_500_000.0


class LinkRate:
    """The estimate for one peer: how fast bulk may go now; infinite when it is not held back."""

    def __init__(self) -> None:
        self.bytes_per_s = math.inf
        self._path = 0.0
        self._num_samples = 0
        self._phase = 0
        self._last: tuple[float, int] | None = None
        self._busy_s = 0.0
        self._was_busy = False

    def busy(self, seconds: float) -> None:
        """There was bulk for the peer for so long, since this was last said."""
        self._busy_s += seconds

    def heard(self, sent_s: float, received_bytes: int) -> None:
        """The peer has received so much in all, at this time of its own clock."""
        if self._last is None or sent_s <= self._last[0] or received_bytes < self._last[1]:
            self._begin(sent_s, received_bytes)  # the first, or another life of the peer
            return
        seconds = sent_s - self._last[0]
        if seconds < SAMPLE_MIN_S:
            return
        rate, busy = (received_bytes - self._last[1]) / seconds, self._busy_s / seconds
        self._begin(sent_s, received_bytes)
        was_busy, self._was_busy = self._was_busy, busy >= BUSY and seconds <= SAMPLE_MAX_S
        if was_busy and self._was_busy:
            self._take(rate)

    def _begin(self, sent_s: float, received_bytes: int) -> None:
        self._last = (sent_s, received_bytes)
        self._busy_s = 0.0

    def _take(self, rate: float) -> None:
        self._num_samples += 1
        grew = rate > (1 + CLEARLY) * self._path
        if grew:
            self._path = rate
        elif rate < (1 - CLEARLY) * self.bytes_per_s:
            self._path += NEWEST * (rate - self._path)
        if self._num_samples < FIRST:
            return
        self._phase = 0 if grew and self._num_samples > FIRST else (self._phase + 1) % len(GAINS)
        if self._path > UNPACED_BYTES_PER_S:
            self.bytes_per_s = math.inf
        else:
            self.bytes_per_s = max(LEAST_BYTES_PER_S, GAINS[self._phase] * self._path)


@dataclass(slots=True)
class _PeerPace:
    """The pace of the path to one peer: the lowest of its rate, what it allows, and `measured`."""

    bucket: Bucket = field(default_factory=Bucket)
    rate: LinkRate = field(default_factory=LinkRate)
    allowed: float = math.inf
    measured: float = math.inf
    received_bytes: int = 0
    last_byte_s: float = -math.inf
    sending: int = 0
    busy_since_s: float = 0.0

    def keep(self) -> None:
        self.bucket.change_rate(min(self.rate.bytes_per_s, self.allowed, self.measured))


class Pacing:
    """The pace of all our streams."""

    def __init__(self, limits: BandwidthLimits) -> None:
        self.senders: Callable[[], int] = lambda: 1
        """How many peers send us bulk at the same time."""
        self._up = Bucket(_bytes_per_s(limits.max_upload_mbps))
        self._down = Bucket(_bytes_per_s(limits.max_download_mbps))
        self._paths: dict[PeerId, _PeerPace] = {}

    # --- what streams ask -------------------------------------------------------------------------
    @contextmanager
    def sending(self, peer_id: PeerId) -> Iterator[None]:
        """Note, while the block lasts, that there is bulk for this peer."""
        path = self._path(peer_id)
        if not path.sending:
            path.busy_since_s = trio.current_time()
        path.sending += 1
        try:
            yield
        finally:
            path.sending -= 1
            if not path.sending:
                self._note_busy(path)

    async def turn(self, peer_id: PeerId, num_bytes: int) -> int:
        """Wait until bulk may go to this peer; how much of it, which then counts as sent."""
        bucket = self._path(peer_id).bucket
        rate = min(bucket.bytes_per_s, self._up.bytes_per_s)
        if rate < math.inf:
            num_bytes = min(num_bytes, max(TURN_BYTES, int(rate * TURN_S)))
        await bucket.turn(num_bytes)
        await self._up.turn(num_bytes * WIRE_FACTOR)
        self._down.charge(num_bytes * ACKNOWLEDGEMENTS)
        return num_bytes

    def sent(self, peer_id: PeerId, num_bytes: int) -> None:
        """Charge bytes that go without a turn."""
        self._path(peer_id).bucket.charge(num_bytes)
        self._up.charge(num_bytes * WIRE_FACTOR)
        self._down.charge(num_bytes * ACKNOWLEDGEMENTS)

    async def may_receive(self) -> None:
        await self._down.wait_clear()

    def received(self, peer_id: PeerId, num_bytes: int) -> None:
        """Charge bytes that came."""
        path = self._path(peer_id)
        path.received_bytes += num_bytes
        path.last_byte_s = trio.current_time()
        self._down.charge(num_bytes * WIRE_FACTOR)
        self._up.charge(num_bytes * ACKNOWLEDGEMENTS)

    async def carry(self, num_bytes: int) -> None:
        """Wait until bytes of others, which come in and go out again, may go over our line."""
        await self._up.turn(num_bytes * WIRE_FACTOR)
        self._down.charge(num_bytes * WIRE_FACTOR)
        await self._down.wait_clear()

    @property
    def loads(self) -> tuple[float, float]:
        """Shares of the limits that the line has carried recently, up and down."""
        return self._up.load, self._down.load

    # --- what links say to each other -------------------------------------------------------------
    def received_bytes(self, peer_id: PeerId) -> int:
        return self._path(peer_id).received_bytes

    def last_byte_s(self, peer_id: PeerId) -> float:
        return self._path(peer_id).last_byte_s

    @property
    def may_send_bytes_per_s(self) -> float | None:
        """The rate at which each of the others may send to us; None for no limit."""
        if not self._down.is_bound:
            return None
        return self._down.bytes_per_s / WIRE_FACTOR / max(1, self.senders())

    def heard(
        self, peer_id: PeerId, sent_s: float, received_bytes: int, may_send: float | None
    ) -> None:
        """Take in a peer's beat: what had come there, by its clock, and what we may send."""
        path = self._path(peer_id)
        if path.sending:
            self._note_busy(path)
        path.rate.heard(sent_s, received_bytes)
        path.allowed = math.inf if may_send is None else max(1.0, may_send)
        path.keep()

    def measured(self, peer_id: PeerId, bytes_per_s: float) -> None:
        """Take in how fast bulk has gone to a peer; it may go a little faster, to see more."""
        path = self._path(peer_id)
        path.measured = FASTER * bytes_per_s if bytes_per_s < UNPACED_BYTES_PER_S else math.inf
        path.keep()

    def _note_busy(self, path: _PeerPace) -> None:
        now_s = trio.current_time()
        path.rate.busy(now_s - path.busy_since_s)
        path.busy_since_s = now_s

    def _path(self, peer_id: PeerId) -> _PeerPace:
        path = self._paths.pop(peer_id, None) or _PeerPace()
        self._paths[peer_id] = path
        if len(self._paths) > MAX_MEMBERS:
            forget_oldest(self._paths, MAX_MEMBERS)
        return path


def _bytes_per_s(mbps: float | None) -> float:
    return math.inf if mbps is None else mbps * 1e6 / 8
