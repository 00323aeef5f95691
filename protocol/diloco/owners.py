"""The owner of each chunk, who averages it: a choice that every peer can make for itself.

Idea. Each chunk of each round has one owner, to whom all send their codes. Nobody hands out the
chunks: every peer ranks the members for each chunk by a hash (rendezvous hashing), and takes the
first that has not its share yet. Peers with equal views choose equally; views that differ in one
member agree on most chunks.

Rules
  1. The rank of member m for chunk c is blake3(key, c, m); the highest owns.
  2. A member owns at most ceil(chunks / members): the load on every link is even. Chunks choose in
     order of their number.
  3. The key names group, fragment and cycle, so that the chunks go round.

Two peers whose views differ may both own a chunk; their results are ordered (chunk_ledger.py). So
a peer takes results also from owners by views that are not its own, but near to it: an owner by a
view that differs in one member (`may_own`). What it does not take although others did, it heals.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Final

import blake3

MAX_UNSEEN: Final = 16
"""Peers that others may see although we do not: so many are tried."""


def owners_of_chunks(key: str, num_chunks: int, members: Sequence[str]) -> tuple[str, ...]:
    """The owner of each chunk.

    Args:
        key: names the group, the fragment and the cycle.
        members: peer ids, in any order; not empty.
    """
    return _first_free(_ranked(key, num_chunks, members), frozenset(members))


def may_own(
    key: str, num_chunks: int, peer_id: str, members: Iterable[str], unseen: Iterable[str] = ()
) -> frozenset[int]:
    """The chunks that a peer owns by a view that is near to ours.

    Args:
        members: our view.
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
    """The owner of each chunk in one view (rule 2)."""
    share = -(-len(ranked) // len(members))
    owned: Counter[str] = Counter()
    owners = []
    for order in ranked:
        owner = next(m for m in order if m in members and owned[m] < share)
        owned[owner] += 1
        owners.append(owner)
    return tuple(owners)


def _place(key: str, chunk: int, member: str) -> tuple[bytes, str]:
    """What members are ordered by (rule 1)."""
    return blake3.blake3(f"{key}/{chunk}/{member}".encode()).digest(length=8), member
