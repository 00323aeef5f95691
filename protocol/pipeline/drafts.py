"""First drafts, from which the planner's search sets out: of paths alone, and of all together.

Paths alone: every microbatch gets a cheap path, the dearest data peers choosing first. Assign min-
max. In every wave the data peers choose a path for each of their slots, those with the dearest
cheapest path first (they decide when the iteration ends), and each takes the cheapest that leaves
enough for all others. Enough is: the stages that are left can still be dealt out so that no path
visits one twice, in this wave (TC1) and in the iteration (CC2). Where waves need not fit, every
relay has a share of its stage instead, as its speed is: else the nearest would be given everything.
As a path takes at most one visit of each stage, R paths of m visits can be dealt from visits v_s
exactly when sum over s of min(v_s, R) >= R * m (limits of order aside).

All together: every data peer gets relays of its own, near to it.

1. Machines are dealt into groups of one data peer and `visited` - 1 relays, and exchanged between
   them until the groups together train fastest: rate = sum over groups of slots / time of a
   microbatch that meets nobody. Stages do not matter yet, so a try costs two sums.
2. Microbatches are dealt out one by one, each to the track that would be done with it first: slow
   groups get few (quotas).
3. Stages are given to the relays, each group's in a legal order, so that every stage has its
   number of machines and no more than its share of microbatches (CC2). Changing labels changes no
   price; a backtracking search with a bound finds them. Some quotas cannot be shared out over
   stages at all (six groups that each skip one of three stages: pairs of them must have equal
   sums), so quotas that differ by a few microbatches are tried next, those that end first first.
   Where none of them can, stages may get more at first, and visits are evened out afterwards.

Where machines are too few for a group of each data peer, the data peers left over rest at first.
Where no labels are found, there is no such start.

Evening out: visits move from stages that have more than their share (CC2) to stages with room.
Where groups of machines are too few for their quotas to add up to every stage's share, a stage gets
too many visits and another one too few. As long as there is such a pair, one path gives up its
visit to the first and goes to a machine of the second instead, all its machines in their cheapest
legal order: the path that pays least for it, in detour and in what the new machine does already.
Every step takes one visit off what is too much, so it ends; where no path can change, there is no
draft.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Final

from protocol.errors import LocalProtocolError

from .problem import THOUSAND, Draws, Problem, Relays, Stages, cheapest_relays, stage_orders
from .simulator import PlanDraft, fits

# --- assignment -----------------------------------------------------------------------------------
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


class Legal:
    """What is legal in a problem, and what it costs.

    Attributes:
        orders: of stages.
        by_set: the same, by the set of their stages.
        prices: of hops.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.orders: Sequence[Stages] = stage_orders(
            problem.num_stages, problem.visited, problem.rules
        )
        self.by_set: dict[frozenset[int], list[Stages]] = {}
        for order in self.orders:
            self.by_set.setdefault(frozenset(order), []).append(order)
        self.prices = hop_prices(problem)


def first_draft(
    legal: Legal, stages: tuple[int, ...], quotas: Mapping[int, int], *, rising: bool = False
) -> PlanDraft:
    """A legal draft for this arrangement, with so many microbatches from each data peer.

    Args:
        rising: whether paths visit stages in rising order alone.

    Raises:
        NoPlan
    """
    orders = [order for order in legal.orders if not rising or list(order) == sorted(order)]
    dealer = _Dealer(legal, stages, orders, sum(quotas.values()))
    paths: dict[int, list[Relays]] = {origin: [] for origin in quotas}
    peers = legal.problem.peers
    while wave := sum(min(peers[o].slots, quotas[o] - len(paths[o])) for o in quotas):
        dealer.open_wave(wave)
        for origin, count in dealer.by_need(quotas, paths):
            paths[origin] += [dealer.deal(origin) for _ in range(count)]
    return PlanDraft(stages, {origin: tuple(chosen) for origin, chosen in paths.items()})


class _Dealer:
    """What is left of stages, in the iteration and in the wave."""

    def __init__(
        self, legal: Legal, stages: tuple[int, ...], orders: Sequence[Stages], microbatches: int
    ) -> None:
        self.problem = problem = legal.problem
        self.stages = stages
        self.orders = orders
        self.prices = legal.prices
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
            visits = -(-microbatches * (self.problem.visited - 1) // (self.problem.num_stages - 1))
            speeds = sum(RATE_UNIT // self.problem.peers[m].forward_us for m in members)
            for machine in members:
                peer = self.problem.peers[machine]
                share = -(-visits * (RATE_UNIT // peer.forward_us) // speeds)
                self.room[machine] = peer.slots if self.problem.rules.waves_fit else share

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

        def cheapest(origin: int) -> int:
            found = filter(None, (self._path(origin, order) for order in self.orders))
            return min((price for price, _ in found), default=0)

        return sorted(counts, key=lambda each: (-cheapest(each[0]), each[0]))

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


# --- evening out ----------------------------------------------------------------------------------
Change = tuple[int, int, int, Relays]
"""What it costs more, the data peer, the place in its order, the other path."""


def evened_out(legal: Legal, draft: PlanDraft) -> PlanDraft | None:
    """A draft in which every stage has at most its share; None where paths cannot change so."""
    problem = legal.problem
    while True:
        visits = Counter(draft.stages[relay] for _, _, path in draft.each() for relay in path)
        over = [s for s in range(1, problem.num_stages) if visits[s] > problem.stage_cap]
        if not over:
            return draft
        under = [s for s in range(1, problem.num_stages) if visits[s] < problem.stage_cap]
        crowded = max(over, key=lambda s: (visits[s], s))
        found = min(_changes(legal, draft, crowded, under), default=None)
        if found is None:
            return None
        _, origin, place, path = found
        paths = draft.paths[origin]
        draft = draft.with_paths({origin: (*paths[:place], path, *paths[place + 1 :])})


def _changes(
    legal: Legal, draft: PlanDraft, crowded: int, under: Sequence[int]
) -> Iterator[Change]:
    """The paths that could leave a crowded stage for one with room, and what that costs."""
    problem, prices = legal.problem, legal.prices
    work_us: Counter[int] = Counter()
    for _, _, path in draft.each():
        work_us.update({relay: problem.peers[relay].forward_us for relay in path})
    held = Counter(
        (place // problem.peers[origin].slots, relay)
        for origin, place, path in draft.each()
        for relay in path
    )
    for origin, place, path in draft.each():
        by_stage = {draft.stages[relay]: relay for relay in path}
        if crowded not in by_stage:
            continue
        wave = place // problem.peers[origin].slots
        round_trip = zip((origin, *path), (*path, origin), strict=True)
        before = sum(prices[a][b] for a, b in round_trip)
        for stage in under:
            if stage in by_stage:
                continue
            takers = [
                m
                for m, held_stage in enumerate(draft.stages)
                if held_stage == stage
                and (not problem.rules.waves_fit or held[wave, m] < problem.peers[m].slots)
            ]
            kept = {s: [m] for s, m in by_stage.items() if s != crowded} | {stage: takers}
            for order in legal.by_set.get(frozenset(kept), ()):
                cheapest = cheapest_relays(origin, [kept[s] for s in order], prices)
                if cheapest is not None:
                    length, other = cheapest
                    busy = sum(work_us[m] for m in takers if m in other)
                    yield length - before + busy, origin, place, other


# --- groups ---------------------------------------------------------------------------------------
MAX_LABEL_STEPS: Final = 2_000
QUOTAS_TRIED: Final = 40
MEMORY: Final = 150
"""Tries that late acceptance looks back, here and in the planner's search."""
MAX_TRIES: Final = 10_000
"""Exchanges tried, at most."""
TRIES_PER_PAIR: Final = 25
"""More exchanges than that are wasted on few machines."""
Groups = list[list[int]]
"""The data peer of each group, then its relays in order."""


def grouped_draft(legal: Legal, draws: Draws) -> PlanDraft | None:
    """A legal draft of groups; None where there is none."""
    problem, prices, size = legal.problem, legal.prices, legal.problem.visited
    number = min(problem.stage_sizes[0], len(problem.peers) // size)
    if not number:
        return None
    seats = _Seats(legal, number, draws).exchanged()
    groups = [seats[g * size : (g + 1) * size] for g in range(number)]
    times = {group[0]: round_trip_us(problem, prices, group) for group in groups}
    spare = seats[number * size :]
    exact: PlanDraft | None = None
    refused: set[tuple[int, ...]] = set()
    for quotas in islice(likely_quotas(problem, times), QUOTAS_TRIED):
        if (alike := tuple(sorted(quotas.values()))) not in refused:
            refused.add(alike)
            each = [quotas[group[0]] for group in groups]
            stages = _Labels(legal, groups, each, problem.stage_cap).found(spare)
            if stages is not None:
                exact = _draft_of(groups, quotas, stages)
                break
    if exact is not None and fits(problem, exact):
        return exact
    quotas = quotas_by_pace(problem, times)
    each = [quotas[group[0]] for group in groups]
    stages = _Labels(legal, groups, each, problem.stage_cap + max(each)).found(spare)
    if stages is None:
        return None
    even = evened_out(legal, _draft_of(groups, quotas, stages))
    return even if even and fits(problem, even) else None


def _draft_of(groups: Groups, quotas: Mapping[int, int], stages: tuple[int, ...]) -> PlanDraft:
    """Every group's microbatches over its own relays; data peers without a group rest."""
    resting: dict[int, tuple[Relays, ...]] = {m: () for m, s in enumerate(stages) if s == 0}
    busy = {g[0]: (tuple(g[1:]),) * quotas[g[0]] for g in groups}
    return PlanDraft(stages, {**resting, **busy})


def round_trip_us(problem: Problem, prices: Sequence[Sequence[int]], group: Sequence[int]) -> int:
    """What a microbatch takes from the data peer through its relays and back, meeting nobody."""
    hops = sum(prices[a][b] for a, b in zip(group, [*group[1:], group[0]], strict=True))
    # The last hop's price has a forward and a backward of the data peer in it; add the loss.
    return hops + problem.peers[group[0]].forward_us * problem.work.loss_permille // THOUSAND


def likely_quotas(problem: Problem, times: Mapping[int, int]) -> Iterator[dict[int, int]]:
    """Microbatches of each data peer: by pace, then others near to it, soonest end first."""
    first = tuple(sorted(quotas_by_pace(problem, times).items()))
    heap, seen = [(0, first)], {first}
    while heap:
        quotas = dict(heapq.heappop(heap)[1])
        yield quotas
        for giver, given in quotas.items():
            for taker, taken in quotas.items():
                if giver == taker or not given:
                    continue
                other = {**quotas, giver: given - 1, taker: taken + 1}
                key = tuple(sorted(other.items()))
                if key not in seen:
                    seen.add(key)
                    ends = (home_us(problem, o, n - 1, times[o]) for o, n in key if n)
                    heapq.heappush(heap, (max(ends), key))


def quotas_by_pace(problem: Problem, times: Mapping[int, int]) -> dict[int, int]:
    """Microbatches of each data peer, dealt out to the track that would be done first."""
    quotas = dict.fromkeys(times, 0)
    for _ in range(problem.microbatches):
        first = min(times, key=lambda o: (home_us(problem, o, quotas[o], times[o]), o))
        quotas[first] += 1
    return quotas


def home_us(problem: Problem, origin: int, place: int, time_us: int) -> int:
    """When a data peer's microbatch comes home, if each takes the same time."""
    peer = problem.peers[origin]
    wave, track = divmod(place, peer.slots)
    return (wave + 1) * time_us + track * peer.forward_us


class _Seats:
    """Machines on the seats of groups; what is left over sits behind them."""

    def __init__(self, legal: Legal, number: int, draws: Draws) -> None:
        self.problem = legal.problem
        self.prices = legal.prices
        self.number = number
        self.size = self.problem.visited
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

    def exchanged(self) -> list[int]:
        """The seats after a search by late acceptance."""
        seats, draws, total = self.seats, self.draws, sum(self.rates)
        best, best_total = list(seats), total
        history = [total] * MEMORY
        taken = self.number * self.size
        for attempt in range(min(MAX_TRIES, TRIES_PER_PAIR * len(seats) ** 2)):
            one, other = draws.below(taken), draws.below(len(seats))
            touched = {one // self.size, min(other // self.size, self.number)}
            seats[one], seats[other] = seats[other], seats[one]
            fresh = {group: self._rate(group) for group in touched}
            old = sum(self.rates[g] for g in touched if g < self.number)
            changed = total - old + sum(fresh.values())
            place = attempt % MEMORY
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

    def __init__(self, legal: Legal, groups: Groups, quotas: Sequence[int], most: int) -> None:
        self.problem = problem = legal.problem
        self.orders = legal.orders
        self.groups = groups
        self.quotas = quotas
        self.turn = sorted(range(len(groups)), key=lambda g: (-quotas[g], g))
        self.dealt = [0, *accumulate(quotas[g] for g in self.turn)]
        resting = problem.stage_sizes[0] - len(groups)
        self.machines_left = [resting, *problem.stage_sizes[1:]]
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
        if not self._can_be_dealt(depth):
            return False
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

    def _can_be_dealt(self, depth: int) -> bool:
        """Whether the stages could take what is left: each the largest quotas, as it has room."""
        dealt, ends = self.dealt, len(self.turn)
        taken = sum(
            min(visits, dealt[min(depth + machines, ends)] - dealt[depth])
            for machines, visits in zip(self.machines_left[1:], self.visits_left[1:], strict=True)
        )
        return taken >= (dealt[ends] - dealt[depth]) * (self.problem.visited - 1)

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
