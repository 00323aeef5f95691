"""A start for the joint search: every data peer gets relays of its own, near to it.

Idea:
1. Machines are dealt into groups of one data peer and `visited` - 1 relays, and exchanged between
   them until the groups together train fastest: rate = sum over groups of slots / time of a
   microbatch that meets nobody. Stages do not matter yet, so a try costs two sums.
2. Microbatches are dealt out one by one, each to the track that would be done with it first: slow
   groups get few (quotas).
3. Stages are given to the relays, each group's in a legal order, so that every stage has its
   number of machines and no more than its share of microbatches (CC2). Changing labels changes no
   price; a backtracking search with a bound finds them. Where the quotas cannot add up to shares,
   stages may get more at first, and visits are evened out afterwards (shares.py).

Where relays are too few for groups of their own, or no labels are found, there is no such start.
"""

from collections.abc import Sequence
from typing import Final

from .draft import Draft, fits
from .draws import Draws
from .problem import THOUSAND, Problem
from .shares import evened_out
from .stage_orders import Stages

MAX_LABEL_STEPS: Final = 50_000
RATE_UNIT: Final = 1 << 50
Groups = list[list[int]]
"""The data peer of each group, then its relays in order."""


def grouped_draft(
    problem: Problem,
    prices: Sequence[Sequence[int]],
    orders: Sequence[Stages],
    draws: Draws,
    tries: int,
    memory: int,
) -> Draft | None:
    """A legal draft of groups; None where there is none."""
    size, number = problem.visited, problem.stage_sizes[0]
    machines = len(problem.peers)
    if number * size > machines:
        return None
    seats = _Seats(problem, prices, number, draws).exchanged(tries, memory)
    groups = [seats[g * size : (g + 1) * size] for g in range(number)]
    times = {group[0]: round_trip_us(problem, prices, group) for group in groups}
    quotas = quotas_by_pace(problem, times)
    spare = seats[number * size :]
    each = [quotas[group[0]] for group in groups]
    for spread in (0, max(each)):
        stages = _Labels(problem, orders, groups, each, problem.stage_cap + spread).found(spare)
        if stages is None:
            continue
        draft = Draft(stages, {g[0]: (tuple(g[1:]),) * quotas[g[0]] for g in groups})
        even = evened_out(problem, draft, orders, prices)
        return even if even and fits(problem, even) else None
    return None


def round_trip_us(problem: Problem, prices: Sequence[Sequence[int]], group: Sequence[int]) -> int:
    """What a microbatch takes from the data peer through its relays and back, meeting nobody."""
    hops = sum(prices[a][b] for a, b in zip(group, [*group[1:], group[0]], strict=True))
    # The last hop's price has a forward and a backward of the data peer in it; add the loss.
    return hops + problem.peers[group[0]].forward_us * problem.work.loss_permille // THOUSAND


def quotas_by_pace(problem: Problem, times: dict[int, int]) -> dict[int, int]:
    """Microbatches of each data peer, dealt out to the track that would be done first."""
    quotas = dict.fromkeys(times, 0)

    def done_us(origin: int) -> tuple[int, int]:
        peer = problem.peers[origin]
        wave, track = divmod(quotas[origin], peer.slots)
        return (wave + 1) * times[origin] + track * peer.forward_us, origin

    for _ in range(problem.microbatches):
        quotas[min(times, key=done_us)] += 1
    return quotas


class _Seats:
    """Machines on the seats of groups; what is left over sits behind them."""

    def __init__(
        self, problem: Problem, prices: Sequence[Sequence[int]], number: int, draws: Draws
    ) -> None:
        self.problem = problem
        self.prices = prices
        self.number = number
        self.size = problem.visited
        self.draws = draws
        self.seats = self._nearest_first()
        self.rates = [self._rate(g) for g in range(number)]

    def _nearest_first(self) -> list[int]:
        """Groups filled one by one with what is nearest to the group's last machine."""
        left = set(range(len(self.prices)))
        seats: list[int] = []
        while len(seats) < self.number * self.size:
            last = seats[-1] if len(seats) % self.size else None
            seats.append(
                min(left) if last is None else min(left, key=lambda m: (self.prices[last][m], m))
            )
            left.remove(seats[-1])
        return [*seats, *sorted(left)]

    def _rate(self, group: int) -> int:
        if group >= self.number:
            return 0
        members = self.seats[group * self.size : (group + 1) * self.size]
        slots = self.problem.peers[members[0]].slots
        return slots * RATE_UNIT // round_trip_us(self.problem, self.prices, members)

    def exchanged(self, tries: int, memory: int) -> list[int]:
        """The seats after a search by late acceptance."""
        seats, draws, total = self.seats, self.draws, sum(self.rates)
        best, best_total = list(seats), total
        history = [total] * memory
        taken = self.number * self.size
        for attempt in range(tries):
            one, other = draws.below(taken), draws.below(len(seats))
            touched = {one // self.size, min(other // self.size, self.number)}
            seats[one], seats[other] = seats[other], seats[one]
            fresh = {group: self._rate(group) for group in touched}
            old = sum(self.rates[g] for g in touched if g < self.number)
            changed = total - old + sum(fresh.values())
            place = attempt % memory
            if changed >= min(history[place], total):
                total = changed
                for group in touched - {self.number}:
                    self.rates[group] = fresh[group]
                if total > best_total:
                    best, best_total = list(seats), total
            else:
                seats[one], seats[other] = seats[other], seats[one]
            history[place] = max(history[place], total)
        return best


class _Labels:
    """The search for stages of the groups' relays."""

    def __init__(
        self,
        problem: Problem,
        orders: Sequence[Stages],
        groups: Groups,
        quotas: Sequence[int],
        most: int,
    ) -> None:
        self.problem = problem
        self.orders = orders
        self.groups = groups
        self.quotas = quotas
        self.turn = sorted(range(len(groups)), key=lambda g: (-quotas[g], g))
        self.machines_left = [0, *problem.stage_sizes[1:]]
        self.visits_left = [most] * problem.num_stages
        self.chosen: dict[int, Stages] = {}
        self.steps = 0

    def found(self, spare: Sequence[int]) -> tuple[int, ...] | None:
        """The stage of each machine; None if none were found."""
        if not self._choose(0):
            return None
        stages = [0] * len(self.problem.peers)
        for group, order in self.chosen.items():
            for relay, stage in zip(self.groups[group][1:], order, strict=True):
                stages[relay] = stage
        left = [stage for stage, count in enumerate(self.machines_left) for _ in range(count)]
        for machine, stage in zip(spare, left, strict=True):
            stages[machine] = stage
        return tuple(stages)

    def _choose(self, depth: int) -> bool:
        if depth == len(self.turn):
            return True
        group = self.turn[depth]
        quota = self.quotas[group]
        for order in self._likely(quota):
            self.steps += 1
            if self.steps > MAX_LABEL_STEPS:
                return False
            self._take(order, quota, 1)
            self.chosen[group] = order
            if self._choose(depth + 1):
                return True
            self._take(order, quota, -1)
        return False

    def _likely(self, quota: int) -> list[Stages]:
        """Orders that still fit, those with the most room first."""
        fitting = [
            order
            for order in self.orders
            if all(self.machines_left[s] and self.visits_left[s] >= quota for s in order)
        ]
        return sorted(fitting, key=lambda order: (-sum(self.visits_left[s] for s in order), order))

    def _take(self, order: Stages, quota: int, sign: int) -> None:
        for stage in order:
            self.machines_left[stage] -= sign
            self.visits_left[stage] -= sign * quota
