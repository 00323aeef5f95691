"""The pairs that form when all peers know each other and are ready at once.

By `hash` the matchmaker's rules make the greedy matching over all pairs in the order of their rank
(protocol/gossip/matchmaking.py). By `bits` partners are those whose numbers differ in one bit, the
lowest first and the next in the next round: 2^k peers have all averaged with all after k rounds.
"""

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

from protocol.gossip.matchmaking import pair_rank

from .arms import Group, Partners


def peer_names(replicas: int) -> list[str]:
    """Ids for `replicas` peers."""
    return [f"replica-{index}" for index in range(replicas)]


def groups_of_round(
    group: Group, run_id: str, round_: int, replicas: int, partners: Partners = "hash"
) -> list[tuple[int, ...]]:
    """Groups of a round, as replica indices; every replica is in exactly one."""
    if group == "all":
        return [tuple(range(replicas))]
    if group != "pairs":
        return [(index,) for index in range(replicas)]
    if partners == "bits":
        return _pairs_by_bit(round_, replicas)
    names = peer_names(replicas)

    def rank(pair: tuple[int, int]) -> bytes:
        one, other = ((names[place], round_) for place in pair)
        return pair_rank(run_id, one, other)

    made: list[tuple[int, ...]] = [*greedy_pairs(range(replicas), rank)]
    alone = set(range(replicas)).difference(*made)
    return made + [(index,) for index in sorted(alone)]


def greedy_pairs(
    there: Iterable[int], rank: Callable[[tuple[int, int]], Any]
) -> list[tuple[int, int]]:
    """The matching that takes the pair of the lowest rank, and again of those that are left."""
    free, made = set(there), []
    for pair in sorted(combinations(sorted(free), 2), key=rank):
        if free.issuperset(pair):
            free.difference_update(pair)
            made.append(pair)
    return made


def _pairs_by_bit(round_: int, replicas: int) -> list[tuple[int, ...]]:
    bits = max(1, (replicas - 1).bit_length())
    bit = 1 << round_ % bits
    groups = {
        tuple(sorted({index, index ^ bit} & set(range(replicas)))) for index in range(replicas)
    }
    return sorted(groups)
