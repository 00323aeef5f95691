"""How fast bulk may go to a peer, so that small messages get through behind it.

Idea. All streams to a peer share one connection. Bulk that is written faster than the path carries
it waits in the buffers of kernel and routers, and every small message waits behind it. Bulk that is
written a little more slowly waits nowhere. What the path carries only the receiver can tell: with
each beat it says how much it has received so far. (The cycle of paces is that of BBR: Cardwell et
al., ACM Queue 14(5), 2016; a second takes the place of a round trip.)

Rules
  1. A sample is what the peer received between two of its beats, by its own clock. It counts when
     we had bulk for it during all of that time, and of the sample before: otherwise it tells of us,
     and of bytes that had not arrived yet, not of the path.
  2. A sample clearly below our pace is what the path carries, and goes into the estimate. One
     clearly above the estimate takes its place. Any other tells nothing new.
  3. Until there are `FIRST` samples bulk is not held back; what has heaped up by then is drained.
     From then on bulk goes at a little less than the estimate; every `len(GAINS)` samples it goes
     faster for one, to see whether there is more, and slower for the next, to drain again. While
     there is more, it goes on going faster.
  4. Above `UNPACED_BYTES_PER_S` nothing is held back: buffers empty faster than anybody notices.
"""

import math
from typing import Final

FIRST: Final = 3
FASTER, DRAIN, CRUISE = 1.25, 0.6, 0.94
GAINS: Final = (FASTER, DRAIN, *[CRUISE] * 10)
"""Rule 3; the mean is 0.94."""
SHORT: Final = 0.9
"""A sample below this part of our pace is clearly below it."""
MORE: Final = 1.1
"""A sample so far above the estimate shows that there is more."""
NEWEST: Final = 0.5
"""Share of a sample in the estimate (rule 2)."""
BUSY: Final = 0.9
"""Part of the time for which there must have been bulk (rule 1)."""
SAMPLE_MIN_S: Final = 0.5
SAMPLE_MAX_S: Final = 5.0
LEAST_BYTES_PER_S: Final = 125_000.0
UNPACED_BYTES_PER_S: Final = 62_500_000.0


class LinkRate:
    """The estimate for one peer.

    Attributes:
        bytes_per_s: how fast bulk may go now; infinite when it is not held back.
    """

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
        grew = rate > MORE * self._path
        if grew:
            self._path = rate
        elif rate < SHORT * self.bytes_per_s:
            self._path += NEWEST * (rate - self._path)
        if self._num_samples < FIRST:
            return
        self._phase = 0 if grew and self._num_samples > FIRST else (self._phase + 1) % len(GAINS)
        if self._path > UNPACED_BYTES_PER_S:
            self.bytes_per_s = math.inf
        else:
            self.bytes_per_s = max(LEAST_BYTES_PER_S, GAINS[self._phase] * self._path)
