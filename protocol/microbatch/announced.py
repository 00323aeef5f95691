"""The iterations that others have told of: data peers to a relay, and relays to a data peer.

A data peer announces an iteration once. That may be before the relay hears that it trains, by a
beat a second later, and while the link between them breaks and comes again. So what was announced
stands, whoever trains: forgotten, the relay would wait for an announcement that the data peer has
made, and the data peer for the relay. One that does not train is not waited for, and moves nobody.

Numbers of iterations are words. So the middle of what several say counts, and nobody goes further
in one step than MAX_LEAP, wherever the others are said to be: a lie costs the others one leap to
follow, and the numbers, at whose end nobody could go on (MAX_ITERATION), last for 2^33 of them. Of
two the lower counts, so whose word it is that is behind must not count for itself: it would be told
to stay there.
"""

from collections.abc import Collection, Iterable
from statistics import median_low
from typing import Final

MAX_ABSENT: Final = 1024
"""Peers that do not train, and whose words stand; those known first make room."""
MAX_LEAP: Final = 1 << 20
"""Iterations: more than a run has in years, so a newcomer is there after one or two."""


def next_iteration(present: int, others: int) -> int:
    """The iteration after the present one, where others are said to be in that one."""
    return max(present + 1, min(others, present + MAX_LEAP))


class Announced:
    """See the top of the file.

    Attributes:
        present: the peers that train.
        newest_of: the newest iteration of each peer that has told of any.
    """

    def __init__(self) -> None:
        self.present: tuple[str, ...] = ()
        self.newest_of: dict[str, int] = {}

    def add(self, teller: str, iteration: int) -> None:
        """A peer has come to an iteration, or has heard of it."""
        self.newest_of[teller] = max(iteration, self.newest_of.get(teller, 0))

    def look(self, present: Iterable[str]) -> None:
        """These peers train."""
        self.present = tuple(present)
        absent = [teller for teller in self.newest_of if teller not in self.present]
        for teller in absent[:-MAX_ABSENT]:
            del self.newest_of[teller]

    @property
    def least(self) -> int:
        """Where the last is of those that train; 0 where none has told of any."""
        return min(self._of(self.present), default=0)

    def middle_of(self, tellers: Collection[str]) -> int:
        """Where the middle of these is, of two the lower: one far ahead takes nobody along."""
        return median_low(self._of(tellers) or [0])

    def _of(self, tellers: Collection[str]) -> list[int]:
        return [self.newest_of[each] for each in tellers if each in self.newest_of]
