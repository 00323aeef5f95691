"""A lower bound for given stages and quotas: tight where one data peer far away decides."""

from collections.abc import Mapping, Sequence

from protocol.pipeline.pipelines import loss_us
from protocol.pipeline.planner import hop_prices
from protocol.pipeline.problem import Problem, cheapest_relays, stage_orders


def arrangement_bound_us(problem: Problem, stages: Sequence[int], quotas: Mapping[int, int]) -> int:
    """A bound over all paths, for given stages and quotas."""
    prices = hop_prices(problem)
    orders = stage_orders(problem.num_stages, problem.visited, problem.rules)
    members = [
        [m for m, held in enumerate(stages) if held == stage]
        for stage in range(problem.num_stages)
    ]  # fmt: skip
    bound = 0
    for origin, quota in quotas.items():
        found = [
            cheapest_relays(origin, [members[stage] for stage in order], prices)
            for order in orders
        ]  # fmt: skip
        trip = min(price for price, _ in filter(None, found)) + loss_us(problem, origin)
        bound = max(bound, _slowest_track_us(problem, origin, quota, trip))
    return bound


def _slowest_track_us(problem: Problem, origin: int, quota: int, trip_us: int) -> int:
    peer = problem.peers[origin]
    tracks = range(min(peer.slots, quota))
    return max(
        (track * peer.forward_us + -(-(quota - track) // peer.slots) * trip_us for track in tracks),
        default=0,
    )
