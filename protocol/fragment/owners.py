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

Two peers whose views differ may both own a chunk; their results are ordered (chunk_ledger.py).
"""

from collections import Counter
from collections.abc import Sequence

import blake3


def owners_of_chunks(key: str, num_chunks: int, members: Sequence[str]) -> tuple[str, ...]:
    """The owner of each chunk.

    Args:
        key: names the group, the fragment and the cycle.
        members: peer ids, in any order; not empty.
    """
    share = -(-num_chunks // len(members))
    owned: Counter[str] = Counter()
    owners = []
    for chunk in range(num_chunks):
        free = [member for member in members if owned[member] < share]
        owner = max(free, key=lambda member: (_rank(key, chunk, member), member))
        owned[owner] += 1
        owners.append(owner)
    return tuple(owners)


def _rank(key: str, chunk: int, member: str) -> bytes:
    return blake3.blake3(f"{key}/{chunk}/{member}".encode()).digest(length=8)
