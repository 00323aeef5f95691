"""How much one microbatch's gradient counts in a stage's step, by how long those of others were.

Idea. A step is clipped by the length of the whole gradient. So one microbatch of many whose
gradient is long enough takes what all others have learnt to nothing, also where no number becomes
infinite: clipping looks at the sum alone. Hence each is measured before it is added. One that is
much longer than they usually are counts for as long as CLIP of them, and no more.

It is measured where it is added, because nothing that is seen on the way there bounds it. A
gradient that arrives may be of the usual size, and be the same for each token: then what the tokens
add to the weights is all in one direction, and many times as long as usual.

Rules
  1. The last WINDOW lengths are kept; the bound is CLIP times their middle (of two middle ones the
     larger). One beyond it counts as if it were there, and is remembered so: whoever sends fewer
     than half of the microbatches does not move the middle beyond honest ones, and a scale that
     rises as training goes on is followed.
  2. Before the first, the bound is what the caller gives.
  3. One that is no number, or infinite, counts nothing.
  4. Nothing at all (a length of 0) says nothing of what is usual.

What honest microbatches differ by from each other is less than CLIP, so in a run without liars
nothing is changed, and a spike of a few hard ones counts less than it would.
"""

import math
from collections import deque
from statistics import median_high
from typing import Final

WINDOW: Final = 32
CLIP: Final = 4.0


class GradientShares:
    """The share of each gradient, by the lengths of those of late.

    Args:
        first: the bound before anything was seen.

    Attributes:
        num_clipped: those that counted less than others, since the start.
    """

    def __init__(self, first: float) -> None:
        self._first = first
        self._lengths: deque[float] = deque(maxlen=WINDOW)
        self.num_clipped = 0

    @property
    def bound(self) -> float:
        """The length from which on a gradient counts less."""
        return CLIP * median_high(self._lengths) if self._lengths else self._first

    def share(self, length: float) -> float:
        """How much a gradient of this length counts: 1 as any other, less, or nothing."""
        bound = self.bound
        if not math.isfinite(length):
            self.num_clipped += 1
            return 0.0
        if length:
            self._lengths.append(min(length, bound))
        if length <= bound:
            return 1.0
        self.num_clipped += 1
        return bound / length
