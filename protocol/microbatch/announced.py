"""The iterations that data peers have announced to a relay.

A data peer announces an iteration once. That may be before the relay hears that it trains, by a
beat a second later, and while the link between them breaks and comes again. So what was announced
stands, whoever trains: forgotten, the relay would wait for an announcement that the data peer has
made, and the data peer for the relay. One that does not train is not waited for, and moves nobody.
"""

from collections.abc import Iterable
from statistics import median_low
from typing import Final

MAX_ABSENT: Final = 1024
"""Data peers that do not train, and whose announcements stand; those known first make room."""


class Announced:
    """See the top of the file.

    Attributes:
        present: the data peers that train.
        newest_of: the newest iteration of each data peer that has announced any.
    """

    def __init__(self) -> None:
        self.present: tuple[str, ...] = ()
        self.newest_of: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Announced by {len(self.newest_of)}, {len(self.present)} present>"

    def add(self, origin: str, iteration: int) -> None:
        """A data peer has come to an iteration."""
        self.newest_of[origin] = max(iteration, self.newest_of.get(origin, 0))

    def look(self, present: Iterable[str]) -> None:
        """These data peers train."""
        self.present = tuple(present)
        absent = [origin for origin in self.newest_of if origin not in self.present]
        for origin in absent[:-MAX_ABSENT]:
            del self.newest_of[origin]

    @property
    def least(self) -> int:
        """Where the last is of those that train; 0 where none has announced any."""
        return min(self._of_present(), default=0)

    @property
    def middle(self) -> int:
        """Where their middle is, of two the lower: one far ahead takes nobody along."""
        return median_low(self._of_present() or [0])

    def _of_present(self) -> list[int]:
        return [each for origin, each in self.newest_of.items() if origin in self.present]
