"""How fast bulk may go to a peer, so that small messages get through behind it.

Idea. All streams to a peer share one connection. Bulk that is written faster than the path carries
it waits in the buffers of kernel and routers, and every small message waits behind it: seconds, on
a thin link. Bulk that is written a little more slowly than that waits nowhere. What the path
carries only the receiver can tell: with each beat it says how much it has received so far.
(The model is that of BBR: Cardwell et al., ACM Queue 14(5), 2016; here a second takes the place of
a round trip.)

Rules
  1. A sample is what the peer received between two of its beats, by its own clock. It counts when
     we had bulk for it during all of that time; otherwise it tells of us, not of the path.
  2. The path's rate is the largest of the last `KEPT` samples. Until there are `FIRST` of them bulk
     is not held back.
  3. Bulk goes at a little less than that rate. Every `len(GAINS)` samples it goes faster for one
     sample, to see whether there is more, and then slower for one, to drain what that has heaped
     up. While there is more, it goes on going faster.
  4. Above `UNPACED_BYTES_PER_S` nothing is held back: buffers empty faster than anybody notices.
"""

import math
from collections import deque
from typing import Final

KEPT: Final = 10
FIRST: Final = 3
GAINS: Final = (1.25, 0.75, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95)
"""Rule 3; the mean is 0.96."""
MORE: Final = 1.1
"""A sample so much above all before it shows that there is more."""
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
        self._samples: deque[float] = deque(maxlen=KEPT)
        self._phase = 0
        self._last: tuple[float, int] | None = None
        self._busy_s = 0.0

    def __repr__(self) -> str:
        return f"<LinkRate {self.bytes_per_s:.0f} B/s of {len(self._samples)} samples>"

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
        if busy >= BUSY and seconds <= SAMPLE_MAX_S:
            self._take(rate)

    def _begin(self, sent_s: float, received_bytes: int) -> None:
        self._last = (sent_s, received_bytes)
        self._busy_s = 0.0

    def _take(self, rate: float) -> None:
        grew = bool(self._samples) and rate > MORE * max(self._samples)
        self._samples.append(rate)
        if len(self._samples) < FIRST:
            return
        self._phase = 0 if grew else (self._phase + 1) % len(GAINS)
        best = max(self._samples)
        if best > UNPACED_BYTES_PER_S:
            self.bytes_per_s = math.inf
        else:
            self.bytes_per_s = max(LEAST_BYTES_PER_S, GAINS[self._phase] * best)
