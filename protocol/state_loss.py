"""A state's loss beside those that others tell: whether its source trains what they train.

Idea. A sample of weights (state_sample.py) shows a lie about all of them, not one about few: a norm
ten times as large, or a row of the embedding, ruins a model as well. What a model is worth its loss
says. All peers of a run measure theirs on the same held-out blocks, and tell it in their beats. So
a joiner measures the state that it was given, and compares.

Rules
  1. Beats of others that train count, of peers that are heeded (membership/heeded.py); not that of
     the source. They are read when the source has named its root: a slow line makes no state look
     old.
  2. A state is *worse* when its loss is above FACTOR times the middle of theirs and FLOOR more, or
     no number. Losses that others tell are of their last validation, some rounds ago, so at the
     start of a run, when losses fall fast, theirs are the higher ones.
  3. Without two others nothing can be told. The middle of two is the higher.

What it does not see: a state that is worse by less than that, or better on the held-out blocks than
it deserves. Liars that are most of the peers one sees, and tell low losses, keep a joiner out.
"""

import math
from collections.abc import Sequence
from statistics import median_high
from typing import Final

FACTOR: Final = 1.25
FLOOR: Final = 0.25
"""Nats per token."""
LEAST_TOLD: Final = 2


def is_worse(loss: float, told: Sequence[float]) -> bool:
    """Whether a state with this loss is worse than those of which these were told (rule 2)."""
    if len(told) < LEAST_TOLD:
        return False
    return not math.isfinite(loss) or loss > FACTOR * median_high(told) + FLOOR
