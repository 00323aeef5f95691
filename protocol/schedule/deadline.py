"""Deadlines that follow what was observed, instead of constants that users must guess.

The bound for the next wait is 2 * median + SPREADS * MAD of the last waits that succeeded (MAD:
median absolute deviation, which one outlier cannot move), never below a floor and never above a
ceiling. Before anything was observed it is the ceiling.
"""

from collections import deque
from statistics import median
from typing import Final

WINDOW: Final = 32
SPREADS: Final = 6.0
"""Median absolute deviations above the median that still count as usual."""
FIRST_OBSERVATIONS: Final = 3
"""The ceiling holds below this number."""


class ObservedDeadline:
    def __init__(self, *, floor_s: float, ceiling_s: float) -> None:
        if not 0 < floor_s <= ceiling_s:
            raise ValueError(f"need 0 < floor ({floor_s}) <= ceiling ({ceiling_s})")
        self._floor_s = floor_s
        self._ceiling_s = ceiling_s
        self._waits_s: deque[float] = deque(maxlen=WINDOW)

    def observe(self, wait_s: float) -> None:
        """Learn from a wait that ended well."""
        self._waits_s.append(wait_s)

    @property
    def current_s(self) -> float:
        if len(self._waits_s) < FIRST_OBSERVATIONS:
            return self._ceiling_s
        middle = median(self._waits_s)
        spread = median(abs(wait - middle) for wait in self._waits_s)
        return min(self._ceiling_s, max(self._floor_s, 2 * middle + SPREADS * spread))
