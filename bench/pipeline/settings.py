"""Settings to plan for, beside the published one (bench/planner_settings.py), at its prices.

Only the published one has its slip of the pen, NL to London at a hundredth of the real rate; it
would decide everything where a rival takes that link once.

Data peers are as many as fill the relays' slots when every path skips as told: r relays on each of
S - 1 stages, L visited: n = r * (S - 1) / (L - 1). Every data peer has two waves of its three
slots.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from bench.planner_settings import PLACES, SLOTS, WAVES, links_between, published_problem
from protocol.pipeline.problem import Problem
from protocol.pipeline.tables import REGIONS

FIVE_PLACES: Final = ("LA", "NL", "Germany", "Singapore", "Oregon")
ONE_PLACE: Final = ("Germany",)
TABLES: Final = 20
GIB: Final = 1 << 30
SLOWEST_GIB: Final = 0.009
FASTEST_GIB: Final = 0.25
FARTHEST_US: Final = 135_000
UNEQUAL: Final = 2.0
"""The slowest machine takes so many times the published forward, the fastest one divided by it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A problem with a name."""

    name: str
    problem: Problem


def usual() -> list[Setting]:
    """All settings of one problem but the largest."""
    return [
        Setting("published", published_problem()),
        Setting("five clusters", _spread(FIVE_PLACES, (5, *[3] * 5), 4)),
        Setting("one cluster", _spread(ONE_PLACE, (5, *[3] * 5), 4)),
        Setting("18 machines", _spread(REGIONS, (6, *[4] * 3), 3)),
        Setting("42 machines", _spread(REGIONS, (7, *[5] * 7), 6)),
        Setting("unequal compute", unequal_compute(_spread(PLACES, (5, *[3] * 5), 4), 0)),
    ]


def largest() -> Setting:
    """Two hundred machines."""
    return Setting("200 machines", _spread(REGIONS, (32, *[24] * 7), 6))


def random_tables(number: int = TABLES) -> list[Setting]:
    """The published sizes with links drawn anew for each pair of machines."""
    return [Setting(f"table {seed}", _drawn_links(seed)) for seed in range(number)]


def unequal_compute(problem: Problem, seed: int) -> Problem:
    """The same machines, each between half and twice as fast (evenly in the logarithm)."""
    random = Random(seed)
    peers = tuple(
        replace(peer, forward_us=round(peer.forward_us * UNEQUAL ** random.uniform(-1, 1)))
        for peer in problem.peers
    )
    return replace(problem, peers=peers)


def _spread(places: Sequence[str], sizes: tuple[int, ...], visited: int) -> Problem:
    machines = [places[number % len(places)] for number in range(sum(sizes))]
    problem = published_problem(visited, machines, sizes, sizes[0] * SLOTS * WAVES)
    return replace(problem, bytes_per_s=links_between(machines)[1])


def _drawn_links(seed: int) -> Problem:
    random = Random(seed)
    number = len(PLACES)
    latencies = [[0] * number for _ in range(number)]
    rates = [[GIB] * number for _ in range(number)]
    for a in range(number):
        for b in range(a):
            latencies[a][b] = latencies[b][a] = random.randint(1_000, FARTHEST_US)
            exponent = random.uniform(math.log(SLOWEST_GIB), math.log(FASTEST_GIB))
            rates[a][b] = rates[b][a] = round(math.exp(exponent) * GIB)
    return replace(
        published_problem(),
        latency_us=tuple(map(tuple, latencies)),
        bytes_per_s=tuple(map(tuple, rates)),
    )
