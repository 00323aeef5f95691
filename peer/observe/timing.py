"""How long the phases of rounds take."""

import bisect
import itertools
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

ROUND_SECONDS_BUCKETS: Final = (
    0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0,
)  # fmt: skip


class RoundPhase(StrEnum):
    """Parts of a round."""

    TRAIN = "train"
    """Inner steps, from opening the round to closing it."""
    MATCH = "match"
    """Finding a partner."""
    EXCHANGE = "exchange"
    """Swapping vectors with the partner."""
    APPLY = "apply"
    """The outer step, and the trainer taking it over."""


class Durations:
    """One histogram of durations. The library's own would read the wall clock, and expose it."""

    def __init__(self) -> None:
        self._in_bucket = [0] * (len(ROUND_SECONDS_BUCKETS) + 1)
        self.sum_s = 0.0

    @property
    def count(self) -> int:
        """Durations observed."""
        return sum(self._in_bucket)

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._in_bucket[bisect.bisect_left(ROUND_SECONDS_BUCKETS, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Upper bounds, and how many durations are no longer."""
        bounds = [str(bound) for bound in ROUND_SECONDS_BUCKETS] + ["+Inf"]
        return list(zip(bounds, itertools.accumulate(self._in_bucket), strict=True))


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """Seconds that one round spent in each phase."""

    train_s: float
    match_s: float
    exchange_s: float
    apply_s: float
