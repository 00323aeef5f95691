"""Which source is asked for which item next: units of a state, pieces of a corpus.

The items of a state are its units (state_plan.py), all of them waited for; those of a corpus its
pieces, in the order in which they are needed (needs.py).

Rules
  1. The order is: items that are waited for, then those needed first, each as given; then those
     needed soon, the rarest first, since few holders may soon be none; then those kept for others,
     the rarest first, one at a time.
  2. An item is asked of the holder that is asked for the least at the time; among equals a hash of
     us, item and holder decides, so that peers with the same needs ask different holders.
  3. An item is on its way once. But one that is waited for is also asked of a holder that is asked
     for nothing else; and, before all others, of any holder once items have come that were asked
     for later. A slow source then delays nobody for long, and over a thin line, where all are slow,
     hardly anything comes twice.
  4. At most MAX_ASKED_PER_SOURCE items are asked of one peer, and MAX_ASKED of all, or fewer, as
     the line allows (`AtOnce`).
  5. A peer that failed to give an item does not have it, until it says again that it has.

Invariants: no item is asked for that is here, nor of a peer that has not said that it has it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import blake3
import numpy as np
import numpy.typing as npt

from protocol.limits import MAX_ASKED, MAX_ASKED_PER_SOURCE
from protocol.schedule.shuffle import Int64Vector, digest_words, splitmix64

BoolVector = npt.NDArray[np.bool_]


class Request(NamedTuple):
    source: str
    item: int


class Scheduler:
    """The items that are wanted, their holders, and which are asked of whom.

    Attributes:
        copies: how many holders each item has.

    Args:
        here: which items are here; bool [items], kept up by the caller.
    """

    def __init__(self, me: str, here: BoolVector) -> None:
        self._me = me
        self._here = here
        # Peers that keep the same items begin with different ones, and give them to each other.
        numbers = np.arange(len(here), dtype=np.uint64)
        self._ties = splitmix64(numbers + digest_words(f"ties/{me}", 1))
        self._holders: dict[str, BoolVector] = {}
        self.copies = np.zeros(len(here), np.int64)
        self._awaited = self._first = self._soon = self._kept = np.empty(0, np.int64)
        self._asked: dict[Request, int] = {}
        """How many items had come when each was asked."""
        self._num_came = 0
        self._only_kept: Request | None = None
        self._at_most = 0
        self._askable: list[str] = []

    def wait_for(self, items: Iterable[int]) -> None:
        self._awaited = np.fromiter(items, np.int64)

    def want(self, first: Iterable[int], soon: Iterable[int], kept: BoolVector) -> None:
        self._first, self._soon = np.fromiter(first, np.int64), np.fromiter(soon, np.int64)
        self._kept = np.flatnonzero(kept)

    def holds(self, source: str, items: BoolVector) -> None:
        """A source has said which items it has; bool [items]."""
        self.gone(source)
        self._holders[source] = items.copy()
        self.copies += items

    def gone(self, source: str) -> None:
        """A source has left; what is asked of it fails by itself."""
        before = self._holders.pop(source, None)
        if before is not None:
            self.copies -= before

    def came(self, request: Request) -> None:
        self._ended(request)
        self._num_came += 1

    def failed(self, request: Request) -> None:
        self._ended(request)
        holds = self._holders.get(request.source)
        if holds is not None and holds[request.item]:
            holds[request.item] = False
            self.copies[request.item] -= 1

    def _ended(self, request: Request) -> None:
        self._asked.pop(request, None)
        if request == self._only_kept:
            self._only_kept = None

    def times_asked(self, item: int) -> int:
        return sum(request.item == item for request in self._asked)

    def next_requests(self, at_most: int = MAX_ASKED, of: str | None = None) -> list[Request]:
        """The requests to be sent now; they count as asked.

        Args:
            at_most: items on their way, those asked before included.
            of: the only source to ask; None for any.
        """
        self._at_most = min(MAX_ASKED, at_most)
        self._askable = [source for source in self._holders if of in (None, source)]
        return list(self._next())

    def _next(self) -> Iterator[Request]:
        yield from self._ask(self._awaited)
        yield from self._ask_again(MAX_ASKED_PER_SOURCE, self._is_overtaken)
        yield from self._ask(self._first)
        yield from self._ask(self._rarest_first(self._soon))
        if self._only_kept is None:
            for request in self._ask(self._rarest_first(self._kept)):
                self._only_kept = request
                yield request
                break
        yield from self._ask_again(1, lambda _: True)

    def _rarest_first(self, items: Int64Vector) -> Int64Vector:
        chosen = items[~self._here[items] & (self.copies[items] > 0)]
        return chosen[np.lexsort((self._ties[chosen], self.copies[chosen]))]

    def _ask(self, items: Int64Vector) -> Iterator[Request]:
        while self._has_room and len(left := items[self._can_come()[items]]):
            yield from self._ask_of_one(int(left[0]), MAX_ASKED_PER_SOURCE)

    def _can_come(self) -> BoolVector:
        """Items that a source can give which may be asked for more; bool [items]."""
        load, can = self._load(), np.zeros_like(self._here)
        for source in self._askable:
            if load[source] < MAX_ASKED_PER_SOURCE:
                can |= self._holders[source]
        can &= ~self._here
        can[[request.item for request in self._asked]] = False
        return can

    def _ask_again(self, per_source: int, is_due: Callable[[int], bool]) -> Iterator[Request]:
        for request, num_came in list(self._asked.items()):
            item = request.item
            is_once = self.times_asked(item) == 1 and not self._here[item]
            if self._has_room and is_once and is_due(num_came) and item in self._awaited:
                yield from self._ask_of_one(item, per_source, but_for=request.source)

    def _is_overtaken(self, num_came: int) -> bool:
        return self._num_came - num_came >= MAX_ASKED  # no more were on their way before

    @property
    def _has_room(self) -> bool:
        return len(self._asked) < self._at_most

    def _load(self) -> Counter[str]:
        return Counter(request.source for request in self._asked)

    def _ask_of_one(self, item: int, per_source: int, but_for: str = "") -> Iterator[Request]:
        load = self._load()
        free = [
            source
            for source in self._askable
            if self._holders[source][item] and load[source] < per_source and source != but_for
        ]
        if free:
            source = min(free, key=lambda each: (load[each], self._draw(item, each)))
            self._asked[request := Request(source, item)] = self._num_came
            yield request

    def _draw(self, item: int, source: str) -> bytes:
        return blake3.blake3(f"{self._me}/{item}/{source}".encode()).digest(length=8)


MORE_EVERY_S: Final = 30.0
"""About what a piece of the usual 4 MiB takes alone over a line of 1 Mbit/s."""


class AtOnce:
    """How many pieces may be on their way at once over a line of unknown rate.

    Eight pieces at once over a thin line all come after eight times as long as one alone, so a line
    begins with one. The number grows with time too, since the other ends may be the thin ones.
    Pieces that did not begin together do not end together.

    Rules
      1. One at first, and one more for each piece that has come through and for each MORE_EVERY_S:
         many slow sources fill a fast line.
      2. It begins anew with one after a piece was lost, which may have had too little of the line,
         and where nothing was on its way for MORE_EVERY_S.
    """

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._under_way = 0
        self._came = 0
        self._since_s = 0.0
        self._last_s = -math.inf

    def limit(self, now_s: float) -> int:
        if self._is_idle(now_s):
            return 1
        return min(self._at_most, 1 + self._came + int((now_s - self._since_s) // MORE_EVERY_S))

    def has_room(self, now_s: float) -> bool:
        return self._under_way < self.limit(now_s)

    def began(self, now_s: float) -> None:
        if self._is_idle(now_s):
            self._restart(now_s)
        self._under_way += 1

    def came(self, now_s: float) -> None:
        self._ended(now_s)
        self._came = min(self._at_most, self._came + 1)

    def refused(self, now_s: float) -> None:
        """A piece was not sent, which tells nothing about the line."""
        self._ended(now_s)

    def lost(self, now_s: float) -> None:
        self._ended(now_s)
        self._restart(now_s)

    def _ended(self, now_s: float) -> None:
        self._under_way -= 1
        self._last_s = now_s

    def _restart(self, now_s: float) -> None:
        self._came, self._since_s = 0, now_s

    def _is_idle(self, now_s: float) -> bool:
        return not self._under_way and now_s - self._last_s >= MORE_EVERY_S
