"""Durations of the phases of a round, as a histogram."""

import bisect
import itertools
from collections.abc import Mapping
from typing import Final

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from .families import Kind

ROUND_SECONDS_BUCKETS: Final = (
    0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0,
)  # fmt: skip


class Durations:
    """One histogram of durations. The library's own would read the wall clock, and expose it."""

    def __init__(self) -> None:
        self._in_bucket = [0] * (len(ROUND_SECONDS_BUCKETS) + 1)
        self.sum_s = 0.0

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self._in_bucket)

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._in_bucket[bisect.bisect_left(ROUND_SECONDS_BUCKETS, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """How many took no longer than each bound."""
        bounds = [str(bound) for bound in ROUND_SECONDS_BUCKETS] + ["+Inf"]
        return list(zip(bounds, itertools.accumulate(self._in_bucket), strict=True))


def round_seconds(durations: Mapping[Kind, Durations]) -> Metric:
    """The histogram of all phases."""
    family = HistogramMetricFamily(
        "loco_round_seconds", "Duration of each phase of a round, in seconds.", labels=["phase"]
    )
    for phase, seen in durations.items():
        family.add_metric([str(phase)], seen.cumulative(), seen.sum_s)
    return family
