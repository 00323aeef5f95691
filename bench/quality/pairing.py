"""The pairs that form when all peers know each other and are ready at once.

Then the matchmaker's rules make the greedy matching over all pairs in the order of their rank
(protocol/gossip/matchmaking.py).
"""

from itertools import combinations

from protocol.gossip.matchmaking import pair_rank

from .arms import Group


def peer_names(replicas: int) -> list[str]:
    """Ids for `replicas` peers."""
    return [f"replica-{index}" for index in range(replicas)]


def groups_of_round(group: Group, run_id: str, round_: int, replicas: int) -> list[tuple[int, ...]]:
    """Groups of a round, as replica indices; every replica is in exactly one."""
    if group == "all":
        return [tuple(range(replicas))]
    if group != "pairs":
        return [(index,) for index in range(replicas)]
    names = peer_names(replicas)

    def rank(pair: tuple[int, int]) -> bytes:
        one, other = ((names[place], round_) for place in pair)
        return pair_rank(run_id, one, other)

    free = set(range(replicas))
    made: list[tuple[int, ...]] = []
    for pair in sorted(combinations(range(replicas), 2), key=rank):
        if free.issuperset(pair):
            free.difference_update(pair)
            made.append(pair)
    return made + [(index,) for index in sorted(free)]
