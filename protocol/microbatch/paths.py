"""Which relays the microbatches of a data peer visit: stages in turn, relays in turn.

Paths visit stages in ascending order, `visited` - 1 of them; which ones are left out, and which
relay of a stage is taken, goes round with the microbatch's number, so that all are used alike.
Latencies are not looked at.
"""

from itertools import combinations

import blake3

Relays = tuple[tuple[str, ...], ...]
"""The peers of each stage from the second on, sorted."""


def paths_of(
    origin: str, iteration: int, microbatches: int, relays: Relays, visited: int
) -> list[tuple[str, ...]]:
    """A path for each microbatch; none where a stage has too few peers for any."""
    choices = [
        stages
        for stages in combinations(range(len(relays)), visited - 1)
        if all(relays[stage] for stage in stages)
    ]
    if not choices:
        return []
    first = _place(origin) + iteration
    paths = []
    for number in range(first, first + microbatches):
        stages = choices[number % len(choices)]
        turn = number // len(choices)
        paths.append(tuple(relays[stage][turn % len(relays[stage])] for stage in stages))
    return paths


def _place(origin: str) -> int:
    """Where a data peer begins to go round."""
    return int.from_bytes(blake3.blake3(origin.encode()).digest(length=2))
