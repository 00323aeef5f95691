"""How far something is that takes a while: what is told of it, and the words that people read.

The code that works tells a `TaskProgress` now and then, and has no clock. The code that shows it
looks at moments of its own choosing; the time left is that at the pace of what it has seen.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from protocol.names import duration, size_text

from .rounds import RunPace

SHOW_AFTER_S: Final = 3.0
"""What ends sooner is not shown: a line that flickers tells nobody anything."""
BYTES: Final = "bytes"
_WHOLE: Final = 100.0
"""A whole, as a pace knows it: no share of it is a leap to another beginning."""


class TaskProgress(msgspec.Struct, frozen=True):
    """How much of something is done.

    Attributes:
        part: which part of it is under way, such as `tokenising`.
        total: None where nobody knows it.
        unit: of both; empty where only their quotient tells something.
    """

    part: str = ""
    done: float = 0.0
    total: float | None = None
    unit: str = BYTES

    @property
    def share(self) -> float | None:
        return min(1.0, max(0.0, self.done / self.total)) if self.total else None

    @property
    def amount(self) -> str:
        if not self.total or not self.unit:
            return ""
        if self.unit == BYTES:
            return f" ({size_text(self.done)} of {size_text(self.total)})"
        return f" ({self.done:,.0f} of {self.total:,.0f} {self.unit})"


Tell = Callable[[TaskProgress], None]
"""Takes how far it is; raises where the work is no longer wanted."""


def nobody(_: TaskProgress) -> None:
    """Is told by work that nobody watches, and nobody ends."""


class Counting:
    """Adds up what is done of one part, and tells it."""

    def __init__(self, tell: Tell, part: str, total: float, unit: str = BYTES) -> None:
        self._tell, self._part, self._total, self._unit = tell, part, total, unit
        self._done = 0.0

    def add(self, count: float) -> None:
        """May raise what `tell` raises."""
        self._done += count
        self._tell(TaskProgress(self._part, self._done, self._total, self._unit))


class Watched:
    """The words for one thing after another, each followed from when it is first seen."""

    def __init__(self) -> None:
        self._what = ("", "")
        self._pace = RunPace()

    def words(self, doing: str, progress: TaskProgress | None, now_s: float) -> str:
        """Such as `preparing the data: tokenising, 43%, 40 s left, 12.1 MB/s (310 MB of 720 MB)`.

        Args:
            doing: what goes on, which is all that is said where no `progress` is.
        """
        if progress is None:
            return doing
        if self._what != (doing, progress.part):
            self._what = doing, progress.part
            self._pace.rest()
        said = [progress.part] if progress.part else []
        if (share := progress.share) is not None:
            self._pace.note(now_s, _WHOLE * share)
            said += [f"{share:.0%}", *self._paced(progress)]
        return f"{doing}: {', '.join(said)}{progress.amount}" if said else doing

    def _paced(self, progress: TaskProgress) -> list[str]:
        """The time left, and the rate of bytes; nothing before enough was seen."""
        percents_per_s, said = self._pace.steps_per_s(), list[str]()
        if percents_per_s is not None and progress.total is not None:
            said = [f"{duration(self._pace.left_s(_WHOLE) or 0.0)} left"]
            if progress.unit == BYTES:
                said.append(f"{percents_per_s / _WHOLE * progress.total / 1e6:.3g} MB/s")
        return said


def progress_sentence(words: str, progress: TaskProgress | None, lasts_s: float) -> str:
    """The line for what has lasted so long; empty before it is worth one."""
    if lasts_s < SHOW_AFTER_S:
        return ""
    is_measured = progress is not None and progress.share is not None
    return words if is_measured else f"{words}; {duration(lasts_s)} so far"
