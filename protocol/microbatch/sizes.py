"""Plausible sizes: of boundaries, and of the gradients of weights.

Boundaries. The activations that leave a stage are about as large as they were in the last
microbatches, whoever sent them, and so are the gradients that come back from it. One that is many
times as large is a fault or a lie: it makes numbers infinite, or outweighs all others. It is
refused before a trainer sees it, and its microbatch goes another way. A small one harms nobody.

A size says that something is wrong, not whose fault it is: a peer passes on what it makes of what
it was given, and a well-chosen value grows on its way through honest layers. So nobody is blamed
for an unusual size, only for one that no honest peer can come to.

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
     their senders, the scale has moved: what was seen is forgotten, and rule 4 holds.

FACTOR is generous. Sizes of honest peers lie within a few times their median, also while the
learning rate warms up; but where paths differ, a stage's activations may be some tens of times as
large in one microbatch as in the next (a few tokens hold most of their length).

Gradients of weights. A step is clipped by the length of the whole gradient, the sum. So a single
long gradient takes what all others have learnt to nothing, also where no number becomes infinite.
Each is therefore measured before it is added, and one that is much longer than usual counts for as
long as CLIP of them. Nothing that is seen on the way bounds it: a gradient that arrives may be of
the usual size and the same for each token, so that all tokens pull the weights in one direction.

Rules of lengths
  1. The last KEPT_LENGTHS lengths are kept; the bound is CLIP times their middle (of two middle
     ones the larger). One beyond it counts as if it were there, and is remembered so: a sender of
     fewer than half of the microbatches does not move the middle beyond honest ones, and a scale
     that rises as training goes on is followed.
  2. Before the first, the bound is what the caller gives.
  3. One that is no number, or infinite, counts nothing.
  4. A length of 0 says nothing of what is usual.

Honest microbatches differ by less than CLIP, so in a run without liars nothing is changed, and a
spike of a few hard ones counts less than it would.
"""

import math
from collections import deque
from enum import StrEnum
from statistics import median_high, median_low
from typing import Final

FACTOR: Final = 256.0
LARGEST: Final = 2.0**20
"""Values within this, and what layers make of them, are far from fp32's end, squared too."""
OF_ONE: Final = 8
SEVERAL: Final = 2
AGE: Final = 256
ODD_TIMES: Final = 8


class SizeVerdict(StrEnum):
    USUAL = "usual"
    UNUSUAL = "unusual"
    """Far larger than what several have sent: it is refused, and nobody is blamed."""
    IMPOSSIBLE = "impossible"
    """No honest peer can have come to it: it is refused, and its sender's fault."""


class _BoundaryKind:
    """Boundaries in one direction from one stage.

    Attributes:
        voices: of each sender when it was heard, in sizes let through, and its last sizes.
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
        self._odd_times += 1
        if sender in self.voices:
            self._odd.add(sender)
        if self._odd_times >= ODD_TIMES and 2 * len(self._odd) > len(self.voices):
            self._odd.clear()
            self._odd_times = 0
            self.voices.clear()


class BoundarySizes:
    def __init__(self) -> None:
        self._kinds: dict[tuple[bool, int | None], _BoundaryKind] = {}

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
        kind = self._kinds.setdefault((is_gradient, stage), _BoundaryKind())
        if size > kind.bound(sender):
            kind.refused(sender)
            return SizeVerdict.UNUSUAL
        kind.let_through(sender, size)
        return SizeVerdict.USUAL


KEPT_LENGTHS: Final = 32
CLIP: Final = 4.0


class GradientShares:
    """The share of each gradient, by the lengths of recent ones.

    Args:
        first: the bound before anything was seen.
    """

    def __init__(self, first: float) -> None:
        self._first = first
        self._lengths: deque[float] = deque(maxlen=KEPT_LENGTHS)
        self.num_clipped = 0

    @property
    def bound(self) -> float:
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
