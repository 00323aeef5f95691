"""Whether a boundary is of a size that can be right, by what several peers have sent of late.

Idea. The activations that leave a stage are about as large today as they were in the last
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
     have the other let through; the trainer's own bound (gradient_shares.py) is for that.
  5. A voice that was not heard among the last AGE sizes of its kind is forgotten, and so is the
     oldest of more than MAX_VOICES: scales move as training goes on.
  6. If ODD_TIMES are refused in a row, and more than half of those that have a voice are among
     their senders, then it is the scale that has moved: what was seen is forgotten, and rule 4
     holds.

FACTOR is generous on purpose. Sizes of honest peers lie within a few times their median, also while
the learning rate warms up; but where paths differ, a stage's activations may be some tens of times
as large in one microbatch as in the next (a few tokens hold most of their length).

Invariant: at most MAX_VOICES times OF_ONE numbers are kept for a direction and stage.
"""

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
MAX_VOICES: Final = 64
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
        oldest = next(iter(self.voices))
        while self._count - self.voices[oldest][0] > AGE or len(self.voices) > MAX_VOICES:
            del self.voices[oldest]
            oldest = next(iter(self.voices))

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
    """What one peer expects of boundaries that come to it. See the top of the file."""

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
