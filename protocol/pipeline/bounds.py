"""Lower bounds: times that no arrangement, no quotas and no paths can beat.

    tracks    a data peer sends at most `slots` microbatches at once, each takes at least its
              shortest closed path, and only so many machines hold the data
    work      all machines together do all the work there is

The largest counts. The bound is loose: it lets every data peer use the best relays of all, as if
no stage had to be shared out. `arrangement_bound_us` knows the stages and is tight where one data
peer far away decides.
"""

from collections.abc import Mapping, Sequence

from .assignment import hop_prices
from .problem import THOUSAND, Problem
from .stage_orders import cheapest_relays, stage_orders


def lower_bound_us(problem: Problem) -> int:
    """A bound over all plans of a problem."""
    prices = hop_prices(problem)
    trips = [_shortest_trip_us(problem, prices, origin) for origin in range(len(problem.peers))]
    return max(_by_tracks_us(problem, trips), _by_work_us(problem))


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
        trip = min(price for price, _ in filter(None, found)) + _loss_us(problem, origin)
        bound = max(bound, _slowest_track_us(problem, origin, quota, trip))
    return bound


def _slowest_track_us(problem: Problem, origin: int, quota: int, trip_us: int) -> int:
    peer = problem.peers[origin]
    tracks = range(min(peer.slots, quota))
    return max(
        (track * peer.forward_us + -(-(quota - track) // peer.slots) * trip_us for track in tracks),
        default=0,
    )


def _loss_us(problem: Problem, origin: int) -> int:
    """The loss, and the part of the last backward that hop prices leave out."""
    work, forward_us = problem.work, problem.peers[origin].forward_us
    later = work.backward_permille * (THOUSAND - work.input_permille) // THOUSAND
    return forward_us * (work.loss_permille + later) // THOUSAND


def _shortest_trip_us(problem: Problem, prices: Sequence[Sequence[int]], origin: int) -> int:
    """The shortest closed walk of `visited` hops; it may pass a relay twice, but not stay there."""
    others = [m for m in range(len(prices)) if m != origin]
    ends = {m: prices[origin][m] for m in others}
    for _ in range(problem.visited - 2):
        ends = {
            b: min((ends[a] + prices[a][b] for a in others if a != b), default=ends[b])
            for b in others
        }
    return min(ends[m] + prices[m][origin] for m in others) + _loss_us(problem, origin)


def _by_tracks_us(problem: Problem, trips: Sequence[int]) -> int:
    """The least time in which the best data peers can have all microbatches home."""
    low, high = 0, max(trips) * problem.microbatches
    while low < high:
        middle = (low + high) // 2
        counts = sorted(_homes(problem, m, trips[m], middle) for m in range(len(trips)))
        if sum(counts[-problem.stage_sizes[0] :]) >= problem.microbatches:
            high = middle
        else:
            low = middle + 1
    return low


def _homes(problem: Problem, origin: int, trip_us: int, time_us: int) -> int:
    """Microbatches that a data peer can have home by then."""
    peer = problem.peers[origin]
    tracks = range(min(peer.slots, problem.microbatches))
    return sum(max(0, time_us - track * peer.forward_us) // trip_us for track in tracks)


def _by_work_us(problem: Problem) -> int:
    """All pieces of work, done by all machines, each as fast as the fastest."""
    work = problem.work
    fastest_us = min(peer.forward_us for peer in problem.peers)
    relay = THOUSAND + work.backward_permille
    permille = relay * problem.visited + work.loss_permille
    return problem.microbatches * fastest_us * permille // THOUSAND // len(problem.peers)
