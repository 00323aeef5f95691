"""The owner of each chunk, who averages it; and which results are believed.

Idea. Each chunk of each round has one owner, to whom all send their codes. Nobody hands out the
chunks: every peer ranks the members for each chunk by a hash (rendezvous hashing), and takes the
first that has not its share yet. Peers with equal views choose equally; views that differ in one
member agree on most chunks.

Rules of owners
  1. The rank of member m for chunk c is blake3(key, c, m); the highest owns.
  2. A member owns at most ceil(chunks / members): the load on every link is even. Chunks choose in
     order of their number.
  3. The key names group, fragment and cycle, so that the chunks go round.

Anybody can sign anything, and a result moves the outer copy of all. It is believed only when what
it says of itself can be true by what we see ourselves.

Rules of beliefs
  4. Its owner owns the chunk by our view, by one of the last few, or by one that differs from them
     in one member: honest views differ by a peer that has just come or gone. A chunk that we refuse
     and the others took is healed afterwards (healing.py).
  5. Its contributors are peers that we know: linked now, or recently. Each counts as much as any
     other (the message allows no other weight), so the largest weight is that of all whom we know.
  6. It is of a cycle near our own round; for any other we have no view to judge by.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache, partial
from typing import Final

import blake3

from protocol.limits import MAX_REMEMBERED
from protocol.outcomes import RefusalReason
from protocol.wire.fragment_messages import ChunkResult, Result

from .chunk_ledger import can_be
from .peers import LATE_ROUNDS, Peers, SendPlan

MAX_UNSEEN: Final = 16
"""Peers that others may see although we do not: at most this many are tried."""


def owners_of_chunks(key: str, num_chunks: int, members: Sequence[str]) -> tuple[str, ...]:
    """The owner of each chunk; the key names the group, the fragment and the cycle."""
    return _first_free(_ranked(key, num_chunks, members), frozenset(members))


def may_own(
    key: str, num_chunks: int, peer_id: str, members: Iterable[str], unseen: Iterable[str] = ()
) -> frozenset[int]:
    """The chunks that a peer owns by a view that is near to ours.

    Args:
        unseen: other peers, which somebody else's view may hold.
    """
    view, further = frozenset({*members, peer_id}), sorted(set(unseen))[:MAX_UNSEEN]
    ranked = _ranked(key, num_chunks, [*view, *(each for each in further if each not in view)])
    views = [view, *(view - {each} for each in view if each != peer_id)]
    views += [view | {each} for each in further if each not in view]
    owned = (_first_free(ranked, each) for each in views)
    return frozenset(
        chunk for owners in owned for chunk, owner in enumerate(owners) if owner == peer_id
    )


def _ranked(key: str, num_chunks: int, members: Iterable[str]) -> list[list[str]]:
    """For each chunk, all members, the highest rank first."""
    everybody = list(members)
    return [
        sorted(everybody, key=partial(_place, key, chunk), reverse=True)
        for chunk in range(num_chunks)
    ]


def _first_free(ranked: Sequence[Sequence[str]], members: AbstractSet[str]) -> tuple[str, ...]:
    share = -(-len(ranked) // len(members))  # rule 2
    owned: Counter[str] = Counter()
    owners = []
    for order in ranked:
        owner = next(m for m in order if m in members and owned[m] < share)
        owned[owner] += 1
        owners.append(owner)
    return tuple(owners)


def _place(key: str, chunk: int, member: str) -> tuple[bytes, str]:
    return blake3.blake3(f"{key}/{chunk}/{member}".encode()).digest(length=8), member


class Beliefs:
    def __init__(self, plan: SendPlan, peers: Peers, num_chunks: Sequence[int]) -> None:
        self._plan = plan
        self._peers = peers
        self._num_chunks = tuple(num_chunks)
        self._views: deque[frozenset[str]] = deque(maxlen=LATE_ROUNDS)
        self._owners_in = lru_cache(MAX_REMEMBERED)(owners_of_chunks)
        self._owned_near = lru_cache(MAX_REMEMBERED)(may_own)

    def is_of_our_time(self, cycle: int) -> bool:
        return bool(self._peers.contributors(cycle))

    def doubt(self, result: Result, chunk: ChunkResult) -> RefusalReason | None:
        """Why a result for a chunk, of our time, is not believed; None if it is."""
        if not self._peers.known.issuperset(result.contributors_of(chunk)):
            return RefusalReason.NOT_LINKED
        if not can_be(chunk.base_stamp, result.cycle):
            return RefusalReason.IMPLAUSIBLE
        if result.owner == self._peers.own_id or self._may_own(result, chunk.chunk):
            return None
        return RefusalReason.NOT_OWNER

    def _may_own(self, result: Result, chunk: int) -> bool:
        """Rule 4; what nearly all who send results own is worked out first, and all once."""
        view = frozenset(self._peers.contributors(result.cycle))
        if view and view not in self._views:
            self._views.append(view)
        known, owner = self._peers.known, result.owner
        if owner not in known:
            return False
        key = self._plan.owners_key(result.fragment, result.cycle)
        about = key, self._num_chunks[result.fragment]
        if any(
            self._owners_in(*about, tuple(sorted(each)))[chunk] == owner for each in self._views
        ):
            return True
        return any(
            chunk in self._owned_near(*about, owner, each, known - each) for each in self._views
        )
