"""Which piece is asked of whom next.

A pure core: what is wanted, who has what and what came of a request go in; requests come out.

Rules
  1. What is waited for goes before all, then what is needed first, in the order of need. Then what
     is needed soon, the rarest first: what few have may be gone when they are. Then what is kept
     for others, the rarest first, one at a time.
  2. A piece is asked of the holder that is asked for the least at the time; among equals a hash of
     us, piece and holder decides, so that peers that need the same ask different holders.
  3. A piece is on its way once. But one that is waited for is also asked of a holder that is asked
     for nothing else; and, before all others, of any holder once so many pieces have come since it
     was asked for that some were asked for later. So a slow source holds up nobody for long, and
     over a thin line, where all are slow, nothing comes twice.
  4. At most MAX_PER_PEER pieces are asked of one peer, and MAX_AT_ONCE of all,
     or fewer, as the line allows (`AtOnce`).
  5. A peer that failed to give a piece does not have it, until it says again that it has.

Invariants: nothing is asked for that is here; nobody is asked for what it has not said it has.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import blake3
import numpy as np
import numpy.typing as npt

from protocol.limits import MAX_AT_ONCE, MAX_PER_PEER
from protocol.schedule.shuffle import digest_words, splitmix64

MAX_KEPT_AT_ONCE: Final = 1
"""Pieces on their way at once that are only kept for others."""


@dataclass(frozen=True, slots=True)
class Request:
    """Ask this peer for that piece."""

    peer_id: str
    piece: int


class PieceRequests:
    """See the top of the file.

    Args:
        me: our peer id.
        here: the pieces that are here already; bool [pieces].
    """

    def __init__(self, me: str, here: npt.NDArray[np.bool_]) -> None:
        self._me = me
        self._here = here.copy()
        # Peers that keep the same pieces begin with different ones, and give them to each other.
        numbers = np.arange(len(here), dtype=np.uint64)
        self._ties = splitmix64(numbers + digest_words(f"ties/{me}", 1))
        self._holders: dict[str, npt.NDArray[np.bool_]] = {}
        self._copies = np.zeros(len(here), np.int64)
        self._awaited: tuple[int, ...] = ()
        self._first: tuple[int, ...] = ()
        self._soon: tuple[int, ...] = ()
        self._kept: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._asked: dict[Request, int] = {}
        """With how many pieces had come when it was asked."""
        self._num_came = 0
        self._at_most = MAX_AT_ONCE
        self._asked_of: Counter[str] = Counter()
        self._on_way: Counter[int] = Counter()
        self._only_kept: set[int] = set()

    @property
    def copies(self) -> npt.NDArray[np.int64]:
        """How many others have said that they have each piece."""
        return self._copies

    def is_here(self, piece: int) -> bool:
        """Whether a piece is here."""
        return bool(self._here[piece])

    # --- what is known ----------------------------------------------------------------------------
    def wait_for(self, pieces: Iterable[int]) -> None:
        """From now on, these are waited for."""
        self._awaited = tuple(pieces)

    def want(self, first: Iterable[int], soon: Iterable[int], kept: npt.NDArray[np.bool_]) -> None:
        """From now on: what is needed first, what soon, and what is kept for others."""
        self._first, self._soon = tuple(first), tuple(soon)
        self._kept = np.flatnonzero(kept)

    def holds(self, peer_id: str, pieces: npt.NDArray[np.bool_]) -> None:
        """A peer has said which pieces it has; bool [pieces]."""
        self.gone(peer_id)
        self._holders[peer_id] = pieces.copy()
        self._copies += pieces

    def gone(self, peer_id: str) -> None:
        """A peer is not there any more; what is asked of it fails by itself."""
        before = self._holders.pop(peer_id, None)
        if before is not None:
            self._copies -= before

    def came(self, request: Request) -> None:
        """The piece is here."""
        self._ended(request)
        self._here[request.piece] = True
        self._num_came += 1

    def failed(self, request: Request) -> None:
        """The peer did not give it."""
        self._ended(request)
        holds = self._holders.get(request.peer_id)
        if holds is not None and holds[request.piece]:
            holds[request.piece] = False
            self._copies[request.piece] -= 1

    def dropped(self, piece: int) -> None:
        """A piece is not here any more."""
        self._here[piece] = False

    # --- what is asked ----------------------------------------------------------------------------
    def next_requests(self, at_most: int = MAX_AT_ONCE) -> list[Request]:
        """What is to be asked for now; it counts as asked.

        Args:
            at_most: pieces on their way, those asked before included.
        """
        self._at_most = min(MAX_AT_ONCE, at_most)
        return list(self._next())

    def _next(self) -> Iterator[Request]:
        awaited = [piece for piece in self._awaited if not self._here[piece]]
        yield from self._ask(awaited)
        yield from self._ask_again(awaited)
        yield from self._ask(piece for piece in self._first if not self._here[piece])
        yield from self._ask(self._rarest_first(self._soon))
        if len(self._only_kept) < MAX_KEPT_AT_ONCE:
            kept = self._rarest_first(self._kept[~self._here[self._kept]])
            for request in self._ask(kept, at_most=MAX_KEPT_AT_ONCE - len(self._only_kept)):
                self._only_kept.add(request.piece)
                yield request
        for piece in awaited:
            if self._on_way[piece] == 1 and not self._has_room_for_more:
                break
            if self._on_way[piece] == 1 and (idle := self._idle_source(piece)) is not None:
                self._note(idle)
                yield idle

    def _rarest_first(self, pieces: Sequence[int] | npt.NDArray[np.int64]) -> list[int]:
        chosen = np.asarray(pieces, np.int64)
        chosen = chosen[~self._here[chosen] & (self._copies[chosen] > 0)]
        order = np.lexsort((self._ties[chosen], self._copies[chosen]))
        return [int(piece) for piece in chosen[order]]

    def _ask(self, pieces: Iterable[int], at_most: int = MAX_AT_ONCE) -> Iterator[Request]:
        for piece in pieces:
            if not self._has_room_for_more or at_most < 1 or not self._anybody_has_room:
                return
            if self._on_way[piece] or (source := self._source(piece)) is None:
                continue
            request = Request(source, piece)
            self._note(request)
            at_most -= 1
            yield request

    def _ask_again(self, awaited: Iterable[int]) -> Iterator[Request]:
        """Ask another holder too for what others have overtaken."""
        overtaken = {
            request.piece: request.peer_id
            for request, num_came in self._asked.items()
            if self._num_came - num_came >= MAX_AT_ONCE  # no more were on their way before
        }
        for piece in awaited:
            if not self._has_room_for_more:
                return
            if self._on_way[piece] == 1 and piece in overtaken:
                source = self._source(piece, but_for=overtaken[piece])
                if source is not None:
                    self._note(again := Request(source, piece))
                    yield again

    @property
    def _has_room_for_more(self) -> bool:
        return len(self._asked) < self._at_most

    @property
    def _anybody_has_room(self) -> bool:
        return any(self._asked_of[peer] < MAX_PER_PEER for peer in self._holders)

    def _source(self, piece: int, at_most: int = MAX_PER_PEER, but_for: str = "") -> str | None:
        """The holder to ask, of those that are asked for less than so many pieces."""
        free = [
            peer_id
            for peer_id, pieces in self._holders.items()
            if pieces[piece] and self._asked_of[peer_id] < at_most and peer_id != but_for
        ]
        return min(
            free, key=lambda peer: (self._asked_of[peer], self._draw(piece, peer)), default=None
        )

    def _idle_source(self, piece: int) -> Request | None:
        source = self._source(piece, at_most=1)
        return None if source is None else Request(source, piece)

    def _draw(self, piece: int, peer_id: str) -> bytes:
        return blake3.blake3(f"{self._me}/{piece}/{peer_id}".encode()).digest(length=8)

    def _note(self, request: Request) -> None:
        self._asked[request] = self._num_came
        self._asked_of[request.peer_id] += 1
        self._on_way[request.piece] += 1

    def _ended(self, request: Request) -> None:
        if request not in self._asked:
            return
        del self._asked[request]
        self._asked_of[request.peer_id] -= 1
        self._on_way[request.piece] -= 1
        if not self._on_way[request.piece]:
            self._only_kept.discard(request.piece)


# --- how many at once -----------------------------------------------------------------------------
MORE_EVERY_S: Final = 30.0
"""A piece of the usual 4 MiB alone takes about so long over a line of 1 Mbit/s."""


class AtOnce:
    """How many pieces may be on their way at once over a line of unknown rate.

    Pieces that are sent at once over a thin line come at once too, and late: eight of them after
    eight times as long as one alone. So a line begins with one piece. A second one that makes the
    first slower shows no more of the line than one that does not, since it may be the other end
    that is thin: so the number is not held down by what is slow, but grows with time as well.
    Pieces that did not begin together do not end together, however many share the line later.

    Rules
      1. One at first, and one more for each piece that has come through: a fast line has as many as
         may be within seconds. One more, too, for each MORE_EVERY_S: many slow ones fill a fast
         line.
      2. It begins anew with one after a piece was lost, which may have had too little of the line,
         and where nothing was on its way for MORE_EVERY_S.

    Args:
        at_most: however fast the line is.
    """

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._under_way = 0
        self._came = 0
        self._since_s = 0.0
        self._last_s = -math.inf

    def limit(self, now_s: float) -> int:
        """How many may be on their way now."""
        if self._is_idle(now_s):
            return 1
        return min(self._at_most, 1 + self._came + int((now_s - self._since_s) // MORE_EVERY_S))

    def has_room(self, now_s: float) -> bool:
        """Whether a further one may begin."""
        return self._under_way < self.limit(now_s)

    def began(self, now_s: float) -> None:
        """A piece is on its way."""
        if self._is_idle(now_s):
            self._restart(now_s)
        self._under_way += 1

    def came(self, now_s: float) -> None:
        """A piece has come through."""
        self._ended(now_s)
        self._came = min(self._at_most, self._came + 1)

    def refused(self, now_s: float) -> None:
        """A piece was not sent, which says nothing of the line."""
        self._ended(now_s)

    def lost(self, now_s: float) -> None:
        """A piece was cut off."""
        self._ended(now_s)
        self._restart(now_s)

    def _ended(self, now_s: float) -> None:
        self._under_way -= 1
        self._last_s = now_s

    def _restart(self, now_s: float) -> None:
        self._came, self._since_s = 0, now_s

    def _is_idle(self, now_s: float) -> bool:
        return not self._under_way and now_s - self._last_s >= MORE_EVERY_S
