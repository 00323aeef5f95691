"""The first draft: every microbatch gets a cheap path, the dearest data peers choosing first.

Idea: assign min-max. In every wave the data peers choose a path for each of their slots, those
with the dearest cheapest path first (they decide when the iteration ends), and each takes the
cheapest that leaves enough for all others. Enough is: the stages that are left can still be dealt
out so that no path visits one twice, in this wave (TC1) and in the iteration (CC2). Where waves
need not fit, every relay has a share of its stage instead, as its speed is: else the nearest would
be given everything. As a path
takes at most one visit of each stage, R paths of m visits can be dealt from visits v_s exactly when
sum over s of min(v_s, R) >= R * m (limits of order aside).
"""

from collections.abc import Mapping, Sequence
from typing import Final

from protocol.errors import LocalProtocolError

from .plan import Draft
from .problem import THOUSAND, Problem
from .simulator import Relays
from .stage_orders import Stages, cheapest_relays

RATE_UNIT: Final = 1 << 50


class NoPlan(LocalProtocolError):
    """No legal plan was found; the message says for what."""


def hop_prices(problem: Problem) -> list[list[int]]:
    """What a hop costs there and back, with the work at its end that a microbatch waits for."""
    numbers = range(len(problem.peers))
    permille = THOUSAND + problem.work.backward_permille * problem.work.input_permille // THOUSAND
    work = [peer.forward_us * permille // THOUSAND for peer in problem.peers]
    return [
        [
            problem.travel_us(a, b) + problem.travel_us(b, a) + work[b] if a != b else 0
            for b in numbers
        ]
        for a in numbers
    ]


def first_draft(
    problem: Problem,
    stages: tuple[int, ...],
    quotas: Mapping[int, int],
    orders: Sequence[Stages],
    prices: Sequence[Sequence[int]],
) -> Draft:
    """A legal draft for this arrangement, with so many microbatches from each data peer.

    Raises:
        NoPlan
    """
    dealer = _Dealer(problem, stages, orders, prices, sum(quotas.values()))
    paths: dict[int, list[Relays]] = {origin: [] for origin in quotas}
    peers = problem.peers
    while wave := sum(min(peers[o].slots, quotas[o] - len(paths[o])) for o in quotas):
        dealer.open_wave(wave)
        for origin, count in dealer.by_need(quotas, paths):
            paths[origin] += [dealer.deal(origin) for _ in range(count)]
    return Draft(stages, {origin: tuple(chosen) for origin, chosen in paths.items()})


class _Dealer:
    """What is left of stages, in the iteration and in the wave."""

    def __init__(
        self,
        problem: Problem,
        stages: tuple[int, ...],
        orders: Sequence[Stages],
        prices: Sequence[Sequence[int]],
        microbatches: int,
    ) -> None:
        self.problem = problem
        self.stages = stages
        self.orders = orders
        self.prices = prices
        self.members: list[list[int]] = [[] for _ in problem.stage_sizes]
        for machine, stage in enumerate(stages):
            self.members[stage].append(machine)
        self.visits = [problem.stage_cap] * problem.num_stages
        self.paths_left = microbatches
        self.wave_left = 0
        self.room: dict[int, int] = {}

    def open_wave(self, microbatches: int) -> None:
        """Give relays their slots back; where waves need not fit, their shares of this wave."""
        for members in self.members[1:]:
            visits = self._visits_of_stage(microbatches)
            speeds = sum(RATE_UNIT // self.problem.peers[m].forward_us for m in members)
            for machine in members:
                peer = self.problem.peers[machine]
                share = -(-visits * (RATE_UNIT // peer.forward_us) // speeds)
                self.room[machine] = peer.slots if self.problem.rules.waves_fit else share

    def _visits_of_stage(self, microbatches: int) -> int:
        visits = microbatches * (self.problem.visited - 1)
        return -(-visits // (self.problem.num_stages - 1))

    def by_need(
        self, quotas: Mapping[int, int], paths: Mapping[int, list[Relays]]
    ) -> list[tuple[int, int]]:
        """Data peers and their microbatches of this wave, the dearest first."""
        counts = [
            (origin, min(self.problem.peers[origin].slots, quota - len(paths[origin])))
            for origin, quota in quotas.items()
            if quota > len(paths[origin])
        ]
        self.wave_left = sum(count for _, count in counts)
        return sorted(counts, key=lambda each: (-self._cheapest(each[0]), each[0]))

    def _cheapest(self, origin: int) -> int:
        found = [self._path(origin, order) for order in self.orders]
        return min((price for price, _ in filter(None, found)), default=0)

    def _path(self, origin: int, order: Stages) -> tuple[int, Relays] | None:
        layers = [[m for m in self.members[s] if self.room[m] > 0] for s in order]
        return cheapest_relays(origin, layers, self.prices)

    def deal(self, origin: int) -> Relays:
        """Take the cheapest path that leaves enough for the others."""
        likely = filter(self._leaves_enough, self.orders)
        found = [path for order in likely if (path := self._path(origin, order))]
        if not found:
            raise NoPlan(
                f"no path is left for {self.problem.peers[origin].name}: the stages cannot be"
                " shared out within these limits and slots"
            )
        _, relays = min(found)
        for relay in relays:
            self.visits[self.stages[relay]] -= 1
            self.room[relay] -= 1
        self.paths_left -= 1
        self.wave_left -= 1
        return relays

    def _leaves_enough(self, order: Stages) -> bool:
        visits = [v - (s in order) for s, v in enumerate(self.visits)][1:]
        room = [
            sum(self.room[m] for m in members) - (stage in order)
            for stage, members in enumerate(self.members) if stage
        ]  # fmt: skip
        return (
            min(visits) >= 0
            and self._can_be_dealt(visits, self.paths_left - 1)
            and self._can_be_dealt(room, self.wave_left - 1)
        )

    def _can_be_dealt(self, visits: Sequence[int], paths: int) -> bool:
        enough = paths * (self.problem.visited - 1)
        return sum(min(v, paths) for v in visits) >= enough
