"""Lower bounds: times that no arrangement, no quotas and no paths can beat.

    tracks    a data peer sends at most `slots` microbatches at once, each takes at least its
              shortest closed walk (below), and only so many machines hold the data
    waves     the others are relays. The microbatch of wave w on a track has w before it, so it can
              have been at a relay and be home by T only if w shortest trips of its data peer and
              one through that relay fit into T. With TC1 a relay takes `slots` of each wave, so by
              T it is visited at most `slots` times for each wave in which it is of use at all
    work      all machines together do all the work there is

The first two are judged together: the bound is the least T for which some choice of data peers has
all microbatches home and leaves relays with enough visits. It is found by dynamic programming over
machines: the most visits that are left, by the number of data peers and of microbatches at home.
Without TC1 relays do not count, and the bound is looser.

No path of a microbatch can be shorter than the shortest walk over priced hops. A path visits
different machines, which makes the shortest one hard to find among many. A walk is a relaxation
that is not: from its origin, over so many hops, never through the origin again, and never straight
back to the machine that it came from. Up to three hops between relays that is a path; longer ones
may come round in a circle, and are only shorter for it.

For every end of a walk the two shortest are kept that come from different machines: where the next
hop would go straight back, the second one counts.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .assignment import hop_prices
from .problem import THOUSAND, Problem

# --- walks ----------------------------------------------------------------------------------------
Lengths = NDArray[np.int64]
"""Lengths of walks, by origin and end."""
NEVER: Final = 1 << 60


def walks(prices: Sequence[Sequence[int]] | NDArray[Any], hops: int) -> list[Lengths]:
    """The lengths of the shortest walks of one hop, of two, and so on."""
    table = np.array(prices, dtype=np.int64)
    np.fill_diagonal(table, NEVER)
    number = len(table)
    first, second = table.copy(), np.full_like(table, NEVER)
    came_from = np.repeat(np.arange(number)[:, None], number, axis=1)
    found = [first]
    for _ in range(hops - 1):
        first, second, came_from = _longer(table, first, second, came_from)
        found.append(first)
    return found


def closed(prices: Sequence[Sequence[int]], hops: int) -> Lengths:
    """The shortest ways from an origin through a machine and back, by both."""
    table = np.array(prices, dtype=np.int64)
    there, back = walks(table, hops - 1), walks(table.T, hops - 1)
    ways = [there[k] + back[hops - 2 - k] for k in range(hops - 1)]
    shortest: Lengths = np.minimum.reduce(ways)
    return np.minimum(shortest, NEVER)


def _longer(
    table: Lengths, first: Lengths, second: Lengths, came_from: NDArray[np.int64]
) -> tuple[Lengths, Lengths, NDArray[np.int64]]:
    """Walks with one hop more."""
    number = len(table)
    ends = np.arange(number)
    longer = [np.full_like(table, NEVER) for _ in range(2)]
    last = np.zeros_like(came_from)
    for origin in range(number):
        straight_back = came_from[origin][:, None] == ends
        so_far = np.where(straight_back, second[origin][:, None], first[origin][:, None])
        ways = np.minimum(so_far + table, NEVER)
        ways[origin] = ways[:, origin] = NEVER
        last[origin] = ways.argmin(axis=0)
        longer[0][origin] = ways[last[origin], ends]
        ways[last[origin], ends] = NEVER
        longer[1][origin] = ways.min(axis=0)
    return longer[0], longer[1], last


# --- bounds ---------------------------------------------------------------------------------------
def lower_bound_us(problem: Problem) -> int:
    """A bound over all plans of a problem."""
    through = closed(hop_prices(problem), problem.visited)
    losses = np.array([loss_us(problem, origin) for origin in range(len(problem.peers))])
    return max(_by_tracks_us(problem, through + losses[:, None]), _by_work_us(problem))


def loss_us(problem: Problem, origin: int) -> int:
    """The loss, and the part of the last backward that hop prices leave out."""
    work, forward_us = problem.work, problem.peers[origin].forward_us
    later = work.backward_permille * (THOUSAND - work.input_permille) // THOUSAND
    return forward_us * (work.loss_permille + later) // THOUSAND


def _by_tracks_us(problem: Problem, through: Lengths) -> int:
    """The least time in which some data peers can have all home, with the others as relays.

    Args:
        through: the shortest trip by data peer and relay.
    """
    trips = [int(trip) for trip in through.min(axis=1)]
    low, high = 0, max(trips) * problem.microbatches + sum(p.forward_us for p in problem.peers)
    while low < high:
        middle = (low + high) // 2
        if _can_be_home(problem, trips, through, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _can_be_home(problem: Problem, trips: Sequence[int], through: Lengths, time_us: int) -> bool:
    all_home = problem.microbatches
    homes = [min(all_home, _homes(problem, m, trip, time_us)) for m, trip in enumerate(trips)]
    most = sorted(homes)[-problem.stage_sizes[0] :]
    if sum(most) < all_home or not problem.rules.waves_fit:
        return sum(most) >= all_home
    visits = _visits(problem, np.array(trips), through, time_us)
    origins = problem.stage_sizes[0]
    # left[k, h]: the most visits to the others when k data peers have h microbatches home.
    left = np.full((origins + 1, all_home + 1), -NEVER, dtype=np.int64)
    left[0, 0] = 0
    for home, visited in zip(homes, visits, strict=True):
        chosen = np.full_like(left, -NEVER)
        chosen[1:, home:] = left[:-1, : all_home + 1 - home]
        chosen[1:, all_home] = left[:-1, all_home - home :].max(axis=1)
        left = np.maximum(left + visited, chosen)
    return int(left[origins, all_home]) >= all_home * (problem.visited - 1)


def _visits(
    problem: Problem, trips: NDArray[np.int64], through: Lengths, time_us: int
) -> list[int]:
    """The most visits to each machine by microbatches that are home by then."""
    waves = np.zeros(len(trips), dtype=np.int64)
    for wave in range(problem.microbatches):
        of_use = ((wave * trips)[:, None] + through <= time_us).any(axis=0)
        if not of_use.any():
            break
        waves += of_use
    return [peer.slots * int(count) for peer, count in zip(problem.peers, waves, strict=True)]


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
