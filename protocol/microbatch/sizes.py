"""Whether what others send is of a size that can be right, by what several have sent of late.

Boundaries. The activations that leave a stage are about as large today as they were in the last
microbatches, whoever sent them, and so are the gradients that come back from it. One that is many
times as large is a fault or a lie: it makes numbers infinite, or outweighs all others. It is
refused before a trainer sees it, and its microbatch goes another way. What is smaller than usual
says nothing and harms nobody.

A size says that something is wrong, not whose fault it is: a peer passes on what it makes of what
it was given, and what is chosen well grows on its way through honest layers. So what is refused for
being unusual is held against nobody; only what no honest peer can have come to is.

Rules
  1. A size is the root mean square of a boundary's values. Sizes are compared with those of the
     same direction from the same stage alone: activations grow from stage to stage.
  2. Beyond LARGEST, or without a number, a boundary is impossible, whatever was seen.
  3. Each sender has one voice, the middle of its last OF_ONE sizes that were let through (of two
     middle ones the smaller). The bound is FACTOR times the middle of all voices, its own among
     them (of two middle ones the larger).
  4. A sender without a voice is judged where at least SEVERAL others have one; until then it is let
     through up to LARGEST. So one identity, however much it sends and whenever it comes, has
     nobody else refused: its voice is one of several, or there is no judgement. Of two, one may
     have the other let through; the trainer's own bound (below) is for that.
  5. A voice that was not heard among the last AGE sizes of its kind is forgotten: scales move as
     training goes on.
  6. If ODD_TIMES are refused in a row, and more than half of those that have a voice are among
     their senders, then it is the scale that has moved: what was seen is forgotten, and rule 4
     holds.

FACTOR is generous on purpose. Sizes of honest peers lie within a few times their median, also while
the learning rate warms up; but where paths differ, a stage's activations may be some tens of times
as large in one microbatch as in the next (a few tokens hold most of their length).

Invariant: at most AGE voices of OF_ONE numbers are kept for a direction and stage.

Gradients of weights: how much that of one microbatch counts in a stage's step. A step is clipped by
the length of the whole gradient. So one microbatch of many whose gradient is long enough takes what
all others have learnt to nothing, also where no number becomes infinite: clipping looks at the sum
alone. Hence each is measured before it is added. One that is much longer than they usually are
counts for as long as CLIP of them, and no more.

It is measured where it is added, because nothing that is seen on the way there bounds it. A
gradient that arrives may be of the usual size, and be the same for each token: then what the tokens
add to the weights is all in one direction, and many times as long as usual.

Rules of lengths
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
from enum import StrEnum
from statistics import median_high, median_low
from typing import Final

# --- boundaries -----------------------------------------------------------------------------------
FACTOR: Final = 256.0
LARGEST: Final = 2.0**20
"""Values within this, and what layers make of them, are far from fp32's end, squared too."""
OF_ONE: Final = 8
SEVERAL: Final = 2
AGE: Final = 256
ODD_TIMES: Final = 8


class SizeVerdict(StrEnum):
    """What is thought of a boundary's size."""

    USUAL = "usual"
    UNUSUAL = "unusual"
    """Far larger than what several have sent: it is refused, and nobody is blamed."""
    IMPOSSIBLE = "impossible"
    """No honest peer can have come to it: it is refused, and its sender's fault."""


class _Direction:
    """What comes in one direction from one stage.

    Attributes:
        voices: the last sizes of each sender, and when it was heard, in sizes let through.
    """

    def __init__(self) -> None:
        self.voices: dict[str, tuple[int, deque[float]]] = {}
        self._count = 0
        self._odd: set[str] = set()
        self._odd_times = 0

    def bound(self, sender: str) -> float:
        """The largest size of this sender that is taken (rules 3 and 4)."""
        if sender not in self.voices and len(self.voices) < SEVERAL:
            return LARGEST
        middle = median_high(median_low(sizes) for _, sizes in self.voices.values())
        return min(LARGEST, FACTOR * middle)

    def let_through(self, sender: str, size: float) -> None:
        """Remember a size; nothing at all is no scale."""
        self._odd.clear()
        self._odd_times = 0
        if not size:
            return
        self._count += 1
        _, sizes = self.voices.pop(sender, (0, deque[float](maxlen=OF_ONE)))
        sizes.append(size)
        self.voices[sender] = self._count, sizes  # last in the order of hearing
        while self._count - self.voices[oldest := next(iter(self.voices))][0] > AGE:
            del self.voices[oldest]

    def refused(self, sender: str) -> None:
        """Rule 6."""
        self._odd_times += 1
        if sender in self.voices:
            self._odd.add(sender)
        if self._odd_times >= ODD_TIMES and 2 * len(self._odd) > len(self.voices):
            self._odd.clear()
            self._odd_times = 0
            self.voices.clear()


class BoundarySizes:
    """What one peer expects of boundaries that come to it."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[bool, int | None], _Direction] = {}

    def judge(
        self, sender: str, size: float, *, stage: int | None, is_gradient: bool
    ) -> SizeVerdict:
        """Judge a boundary that has come; what is usual is remembered.

        Args:
            size: root mean square of its values.
            stage: the sender's, None where it is not known.
        """
        if not size <= LARGEST:
            return SizeVerdict.IMPOSSIBLE
        kind = self._kinds.setdefault((is_gradient, stage), _Direction())
        if size > kind.bound(sender):
            kind.refused(sender)
            return SizeVerdict.UNUSUAL
        kind.let_through(sender, size)
        return SizeVerdict.USUAL


# --- gradients ------------------------------------------------------------------------------------
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
