"""The legal paths: in which order stages may be visited, and by which machines.

There are few orders (22 for six stages of which four are visited, with SkipPipe's limits), so they
are enumerated once; where a choice of stages and limits has too many, it is refused. The cheapest
machines along one order are found by dynamic programming, stage by stage: price of a path = the sum
of what its hops cost both ways.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Final

from protocol.errors import LocalProtocolError

from .problem import PathRules
from .simulator import Relays

MAX_ORDERS: Final = 20_000
Stages = tuple[int, ...]


def stage_orders(num_stages: int, visited: int, rules: PathRules) -> tuple[Stages, ...]:
    """The orders in which relay stages may be visited (CC1, CC3), sorted.

    Raises:
        LocalProtocolError: there are none, or too many to enumerate.
    """
    found = tuple(islice(_orders((), 0, num_stages, visited - 1, rules), MAX_ORDERS + 1))
    if not found or len(found) > MAX_ORDERS:
        raise LocalProtocolError(
            f"{'no' if not found else f'more than {MAX_ORDERS}'} orders to visit {visited} of"
            f" {num_stages} stages within these limits; change stages, visited or max_jump"
        )
    return found


def within(order: Stages, rules: PathRules) -> bool:
    """Whether stages may be visited in this order (CC3)."""
    frontiers = accumulate((0, *order), max)
    jumps = [abs(stage - frontier) for stage, frontier in zip(order, frontiers, strict=False)]
    return max(jumps, default=0) <= rules.max_jump and _swaps_fit(order, rules)


def cheapest_relays(
    origin: int, layers: Sequence[Sequence[int]], price: Sequence[Sequence[int]]
) -> tuple[int, Relays] | None:
    """The cheapest closed path from `origin` through one machine of each layer.

    Args:
        price: of a hop, there and back, the work at its end included.

    Returns:
        Its price and relays, the lowest numbers among equals; None if a layer is empty.
    """
    if not all(layers):
        return None
    ends: list[tuple[int, Relays]] = [(0, ())]
    for layer in layers:
        if not layer:
            return None
        ends = [
            min(
                (so_far + price[path[-1] if path else origin][machine], (*path, machine))
                for so_far, path in ends
            )
            for machine in layer
        ]
    closed = [(so_far + price[path[-1]][origin], path) for so_far, path in ends if path]
    return min(closed, default=None)


def _orders(
    order: Stages, frontier: int, num_stages: int, left: int, rules: PathRules
) -> Iterator[Stages]:
    if not left:
        yield order
        return
    for stage in range(1, num_stages):
        if stage not in order and abs(stage - frontier) <= rules.max_jump:
            longer = (*order, stage)
            if _swaps_fit(longer, rules):
                yield from _orders(longer, max(frontier, stage), num_stages, left - 1, rules)


def _swaps_fit(order: Stages, rules: PathRules) -> bool:
    frontier, distances = 0, []
    for stage in order:
        if stage < frontier:
            distances.append(frontier - stage)
        frontier = max(frontier, stage)
    return (
        len(distances) <= rules.max_swaps
        and max(distances, default=0) <= rules.max_swap_distance
        and sum(distances) <= rules.max_swap_sum
    )
