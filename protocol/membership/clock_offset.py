"""How far our wall clock is from the swarm's.

A peer's clock is read as it was at the middle of a round trip (Cristian's algorithm): the offset
lies within half the round trip of `their_time - our_time`, ours at the middle too. Of each peer the
sample with the shortest round trip, which has the tightest bound, counts until newer ones push it
out. Over the peers the median is taken: up to half of them may be wrong or lying without moving it
beyond the range of the honest ones.

A clock that is further from ours than MAX_CLOCK_OFFSET_S is not believed, whoever shows it: one of
the two machines is set wrong. So no number of peers moves us further than that.

Peers correct their clocks too. Samples are therefore compared with our *uncorrected* wall clock,
while they give their corrected one: a swarm follows its majority, and never adds its own correction
to itself.
"""

from collections import deque
from operator import itemgetter
from statistics import median
from typing import Final

from protocol.limits import ANSWER_S, MAX_CLOCK_OFFSET_S, MAX_LINKS, forget_oldest

MAX_SAMPLES_PER_PEER: Final = 8


class ClockOffsetEstimator:
    """Our clock's offset, by samples of as many peers as links; the oldest one gives way."""

    def __init__(self) -> None:
        # (round trip, offset) by peer
        self._samples: dict[str, deque[tuple[float, float]]] = {}

    def add(self, peer: str, their_time_s: float, round_trip_s: float, our_time_s: float) -> float:
        """Take in one reading of a peer's clock, if it can be believed; how far it is ahead.

        Args:
            their_time_s: the Unix time that it gave.
            round_trip_s: of question and answer.
            our_time_s: our own uncorrected wall clock when the answer arrived.
        """
        offset_s = their_time_s - (our_time_s - round_trip_s / 2)
        if not abs(offset_s) <= MAX_CLOCK_OFFSET_S or not 0 <= round_trip_s <= ANSWER_S:
            return offset_s
        kept = self._samples.pop(peer, deque(maxlen=MAX_SAMPLES_PER_PEER))
        kept.append((round_trip_s, offset_s))
        self._samples[peer] = kept
        forget_oldest(self._samples, MAX_LINKS)
        return offset_s

    def estimate(self) -> float | None:
        """The offset from our wall clock to the swarm's time; None before the first sample."""
        best = [min(kept, key=itemgetter(0)) for kept in self._samples.values()]
        return median(offset_s for _, offset_s in best) if best else None
