"""How evenly pairs meet: counts of all pairs, their spread, and repeats."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PairFigures:
    """Pairs that have met.

    Attributes:
        least, most: meetings of a pair, over the mean of all pairs.
        cv: standard deviation of a pair's meetings, over the mean.
        chi_squared: per pair; 1 if partners were drawn evenly and independently.
        repeats: part of the meetings in which a peer met the one it had met just before.
    """

    meetings: int
    least: float
    most: float
    cv: float
    chi_squared: float
    repeats: float


def pair_figures(meetings: Iterable[Pair], num_peers: int) -> PairFigures:
    """Look at meetings, in the order in which they began."""
    met: list[Pair] = [(min(pair), max(pair)) for pair in meetings]
    if not met:
        return PairFigures(0, 0.0, 0.0, math.nan, math.nan, math.nan)
    counted = Counter(met)
    counts = [counted[a, b] for a in range(num_peers) for b in range(a + 1, num_peers)]
    mean = len(met) / len(counts)
    spread = statistics.fmean((count - mean) ** 2 for count in counts)
    return PairFigures(
        meetings=len(met),
        least=min(counts) / mean,
        most=max(counts) / mean,
        cv=math.sqrt(spread) / mean,
        chi_squared=spread / mean,
        repeats=_repeats(met) / (2 * len(met)),
    )


def _repeats(met: Sequence[Pair]) -> int:
    last: dict[int, int] = {}
    repeats = 0
    for one, other in met:
        repeats += (last.get(one) == other) + (last.get(other) == one)
        last[one], last[other] = other, one
    return repeats


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share of them lies; nan without any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan
