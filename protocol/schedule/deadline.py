"""Deadlines that follow what was observed, instead of constants that users must guess.

The bound for the next wait is 2 * median + SPREADS * MAD of the last waits that succeeded (MAD:
median absolute deviation, which one outlier cannot move), never below a floor and never above a
ceiling. Before a few were observed it is the ceiling, or what the caller has seen besides: where
somebody lets down each wait, none succeeds, and a newcomer would always wait as long as can be.
"""

import math
from collections import deque
from statistics import median
from typing import Final

KEPT_WAITS: Final = 32
SPREADS: Final = 6.0
"""Median absolute deviations above the median that still count as usual; times that others' time
counts before there are enough to tell."""
FIRST_OBSERVATIONS: Final = 3
"""Enough of them."""


class ObservedDeadline:
    def __init__(self, *, floor_s: float, ceiling_s: float) -> None:
        if not 0 < floor_s <= ceiling_s:
            raise ValueError(f"need 0 < floor ({floor_s}) <= ceiling ({ceiling_s})")
        self._floor_s = floor_s
        self._ceiling_s = ceiling_s
        self._waits_s: deque[float] = deque(maxlen=KEPT_WAITS)

    def observe(self, wait_s: float) -> None:
        """Learn from a wait that ended well."""
        self._waits_s.append(wait_s)

    @property
    def current_s(self) -> float:
        return self.bound_s(math.inf)

    def bound_s(self, others_s: float) -> float:
        """The bound now.

        Args:
            others_s: how long those took that did their part of a wait which did not succeed.
        """
        if len(self._waits_s) < FIRST_OBSERVATIONS:
            return min(self._ceiling_s, max(self._floor_s, SPREADS * others_s))
        middle = median(self._waits_s)
        spread = median(abs(wait - middle) for wait in self._waits_s)
        return min(self._ceiling_s, max(self._floor_s, 2 * middle + SPREADS * spread))
