"""How far our wall clock is from the swarm's.

A peer's clock is read as it was at the middle of a round trip (Cristian's algorithm): the
offset lies within half the round trip of `their_time - our_time`, where our time is the middle
too. Of each peer the sample with the shortest round trip counts, since it has the tightest
bound, until newer samples push it out. Over the peers the median is taken: up to half of them
may be wrong or lying without moving it beyond the range of the honest ones.

Peers correct their clocks too. Samples are therefore compared with our *uncorrected* wall
clock, while they give their corrected one: a swarm follows its majority, and never adds its own
correction to itself.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from statistics import median
from typing import Final

from protocol.limits import MAX_LINKS

MAX_SAMPLES_PER_PEER: Final = 8
MAX_ROUND_TRIP_S: Final = 10.0
"""A sample with a longer round trip says too little to be kept."""


@dataclass(frozen=True, slots=True)
class _Sample:
    round_trip_s: float
    offset_s: float


class ClockOffsetEstimator:
    """Estimates our offset from what peers say the time is.

    It keeps samples of as many peers as there are links; the one heard longest ago gives way.
    """

    def __init__(self) -> None:
        self._samples: OrderedDict[str, deque[_Sample]] = OrderedDict()

    def add(self, peer: str, their_time_s: float, round_trip_s: float, our_time_s: float) -> None:
        """Take in one reading of a peer's clock.

        Args:
            peer: whose clock.
            their_time_s: the Unix time that it gave.
            round_trip_s: how long the question and the answer took together.
            our_time_s: our own uncorrected wall clock when the answer arrived.
        """
        offset_s = their_time_s - (our_time_s - round_trip_s / 2)
        if not math.isfinite(offset_s) or not 0 <= round_trip_s <= MAX_ROUND_TRIP_S:
            return
        kept = self._samples.setdefault(peer, deque(maxlen=MAX_SAMPLES_PER_PEER))
        kept.append(_Sample(round_trip_s, offset_s))
        self._samples.move_to_end(peer)
        while len(self._samples) > MAX_LINKS:
            self._samples.popitem(last=False)

    def estimate(self) -> float | None:
        """The offset from our wall clock to the swarm's time; None before the first sample."""
        best = [
            min(kept, key=lambda sample: sample.round_trip_s) for kept in self._samples.values()
        ]
        return median(sample.offset_s for sample in best) if best else None
