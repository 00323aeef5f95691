"""The planner: arrangement, quotas and paths for a problem, the same on every machine.

Idea: iterated local search (Lourenco, Martin and Stutzle 2003) from a first plan. A move changes
the plan a little, the event simulator prices it, and it stays if the plan is not worse. A search
that stands still goes on near the best plan, with two machines exchanged and paths dealt anew:
single moves do not lead from slots that fit one arrangement to those of another.

Price: the moment at which the last microbatch is done, plus the mean moment over all of them, so
that a plateau of equal ends still has a slope. The plan that ends first is kept. Half of the moves
begin at the data peer that comes home last.

All numbers are integers, draws are seeded with the problem's digest, and the budget is counted in
simulated iterations, never in seconds, so all machines walk the same way. No plan is simulated
twice. Dealing paths anew takes about as long as one iteration for each machine.

First plans for paths alone: wave by wave (as many microbatches as a data peer has slots) the data
peers choose paths, those with the dearest cheapest path first, because they decide when the
iteration ends. Each takes the cheapest path that leaves enough for the others, by wave and by
iteration: R paths of m visits can be dealt from visits v_s exactly when sum over s of min(v_s, R)
>= R * m, as a path takes at most one visit of each stage (limits of jumps aside). A relay has a
share of its stage's visits in each wave, by its speed; else the nearest would get everything.

First plans for all together: every data peer gets relays of its own, near to it. The best of
several is taken.

1. Machines are dealt into groups of one data peer and `visited` - 1 relays, and exchanged until the
   groups together train fastest: rate = sum over groups of slots / time of a microbatch that meets
   nobody. Stages do not matter yet, so a try costs two sums.
2. Microbatches are dealt out one by one, each to the track that would be done with it first, so
   slow groups get few (quotas).
3. Stages are given to each group's relays in a legal order, so that every stage has its number of
   machines. Backtracking finds them; labels change no price.
4. Visits move from stages that have more than their share (CC2) to stages with room: the path that
   pays least for it, in detour and in work that the new machine has already, goes to a machine of
   the other stage. Every step takes one visit off the excess, so it ends; where no path can change,
   there is no such plan.

Data peers for whom there are too few machines to form a group rest at first.

Mending fits a plan to a problem that has changed a little: a descent in which microbatches move one
by one to another machine of the same stage, those that come home last first. Nothing is drawn, so
two problems that differ little are judged alike.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from protocol.errors import LocalProtocolError

from .problem import (
    THOUSAND,
    Draws,
    Problem,
    RelayNumbers,
    Stages,
    cheapest_relays,
    stage_orders,
    within,
)
from .simulator import Order, Plan, Simulator, jobs_of


class NoPlan(LocalProtocolError):
    """No legal plan was found; the message says for what."""


# --- what is legal --------------------------------------------------------------------------------
def hop_prices(problem: Problem) -> list[list[int]]:
    """The time of a hop there and back, with the work at its end that a microbatch waits for."""
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
    """The legal orders of stages, and the prices of hops."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.orders: Sequence[Stages] = stage_orders(
            problem.num_stages, problem.visited, problem.rules
        )
        self.prices = hop_prices(problem)

    def cheapest(
        self, origin: int, machines: Mapping[int, Sequence[int]]
    ) -> tuple[int, RelayNumbers] | None:
        """The cheapest path over one machine of each of these stages; None where none is legal."""
        order = tuple(sorted(machines))
        if not within(order, self.problem.rules):
            return None
        return cheapest_relays(origin, [machines[stage] for stage in order], self.prices)


# --- first plans for paths alone ------------------------------------------------------------------
RATE_UNIT: Final = 1 << 50


def first_paths(legal: Legal, stages: tuple[int, ...], quotas: Mapping[int, int]) -> Plan:
    """A legal plan for this arrangement, with these quotas of microbatches. Raises NoPlan."""
    dealer = _Dealer(legal, stages, sum(quotas.values()))
    paths: dict[int, list[RelayNumbers]] = {origin: [] for origin in quotas}
    peers = legal.problem.peers
    while wave := sum(min(peers[o].slots, quotas[o] - len(paths[o])) for o in quotas):
        dealer.open_wave(wave)
        for origin, count in dealer.by_need(quotas, paths):
            paths[origin] += [dealer.deal(origin) for _ in range(count)]
    return _plan_of(stages, paths)


def _plan_of(stages: tuple[int, ...], paths: Mapping[int, Sequence[RelayNumbers]]) -> Plan:
    return Plan(stages, ((),) * len(stages)).with_paths(paths)


class _Dealer:
    def __init__(self, legal: Legal, stages: tuple[int, ...], microbatches: int) -> None:
        self.problem = problem = legal.problem
        self.stages = stages
        self.orders = legal.orders
        self.prices = legal.prices
        self.members: list[list[int]] = [[] for _ in problem.stage_sizes]
        for machine, stage in enumerate(stages):
            self.members[stage].append(machine)
        self.visits = [problem.stage_cap] * problem.num_stages
        self.paths_left = microbatches
        self.wave_left = 0
        self.room: dict[int, int] = {}

    def open_wave(self, microbatches: int) -> None:
        for members in self.members[1:]:
            visits = -(-microbatches * (self.problem.visited - 1) // (self.problem.num_stages - 1))
            speeds = sum(RATE_UNIT // self.problem.peers[m].forward_us for m in members)
            for machine in members:
                speed = RATE_UNIT // self.problem.peers[machine].forward_us
                self.room[machine] = -(-visits * speed // speeds)

    def by_need(
        self, quotas: Mapping[int, int], paths: Mapping[int, list[RelayNumbers]]
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

    def _path(self, origin: int, order: Stages) -> tuple[int, RelayNumbers] | None:
        layers = [[m for m in self.members[s] if self.room[m] > 0] for s in order]
        return cheapest_relays(origin, layers, self.prices)

    def deal(self, origin: int) -> RelayNumbers:
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
def evened_out(legal: Legal, plan: Plan) -> Plan | None:
    """A plan in which every stage has at most its share; None where paths cannot change so."""
    problem = legal.problem
    while True:
        visits = Counter(plan.stages[relay] for _, _, path in plan.each() for relay in path)
        over = [s for s in range(1, problem.num_stages) if visits[s] > problem.stage_cap]
        if not over:
            return plan
        under = [s for s in range(1, problem.num_stages) if visits[s] < problem.stage_cap]
        crowded = max(over, key=lambda s: (visits[s], s))
        found = min(_changes(legal, plan, crowded, under), default=None)
        if found is None:
            return None
        _, origin, place, path = found
        plan = put(plan, [(origin, place, path)])


def _changes(
    legal: Legal, plan: Plan, crowded: int, under: Sequence[int]
) -> Iterator[tuple[int, int, int, RelayNumbers]]:
    """The paths that could leave a crowded stage for one with room.

    Each is what it costs more, the data peer, the place in its order, and the other path.
    """
    problem, prices = legal.problem, legal.prices
    work_us: Counter[int] = Counter()
    for _, _, path in plan.each():
        work_us.update({relay: problem.peers[relay].forward_us for relay in path})
    for origin, place, path in plan.each():
        by_stage = {plan.stages[relay]: [relay] for relay in path}
        if crowded not in by_stage:
            continue
        round_trip = zip((origin, *path), (*path, origin), strict=True)
        before = sum(prices[a][b] for a, b in round_trip)
        del by_stage[crowded]
        for stage in set(under) - set(by_stage):
            takers = [m for m, held in enumerate(plan.stages) if held == stage]
            if cheapest := legal.cheapest(origin, {**by_stage, stage: takers}):
                length, other = cheapest
                busy = sum(work_us[m] for m in takers if m in other)
                yield length - before + busy, origin, place, other


# --- groups ---------------------------------------------------------------------------------------
MAX_LABEL_STEPS: Final = 2_000
EXCHANGES: Final = 100
"""Exchanges of two machines that are tried, for each machine."""


def grouped_plan(legal: Legal, draws: Draws) -> Plan | None:
    """A legal plan of groups; None where no groups are legal."""
    problem, prices, size = legal.problem, legal.prices, legal.problem.visited
    number = min(problem.stage_sizes[0], len(problem.peers) // size)
    if not number:
        return None
    seats = _seated(legal, number, draws)
    groups = [seats[g * size : (g + 1) * size] for g in range(number)]
    quotas = quotas_by_pace(
        problem, {group[0]: round_trip_us(problem, prices, group) for group in groups}
    )
    stages = _Labels(legal, groups, quotas).found(seats[number * size :])
    if stages is None:
        return None
    paths = {origin: (tuple(relays),) * quotas[origin] for origin, *relays in groups}
    return evened_out(legal, _plan_of(stages, paths))


def round_trip_us(problem: Problem, prices: Sequence[Sequence[int]], group: Sequence[int]) -> int:
    """The time of a microbatch through its group's relays and back, meeting nobody."""
    hops = sum(prices[a][b] for a, b in zip(group, [*group[1:], group[0]], strict=True))
    # The last hop's price has a forward and a backward of the data peer in it; add the loss.
    return hops + problem.peers[group[0]].forward_us * problem.work.loss_permille // THOUSAND


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


def _seated(legal: Legal, number: int, draws: Draws) -> list[int]:
    """Machines on the seats of the groups; what is left over sits behind them."""
    problem, prices, size = legal.problem, legal.prices, legal.problem.visited
    seats = _nearest_first(prices, number, size)

    def rate(group: int) -> int:
        members = seats[group * size : (group + 1) * size]
        slots = problem.peers[members[0]].slots
        return slots * RATE_UNIT // round_trip_us(problem, prices, members)

    rates = [rate(group) for group in range(number)]
    for _ in range(EXCHANGES * len(seats)):
        one, other = draws.below(number * size), draws.below(len(seats))
        seats[one], seats[other] = seats[other], seats[one]
        fresh = {g: rate(g) for g in (one // size, other // size) if g < number}
        if sum(fresh.values()) >= sum(rates[g] for g in fresh):
            rates = [fresh.get(g, before) for g, before in enumerate(rates)]
        else:
            seats[one], seats[other] = seats[other], seats[one]
    return seats


def _nearest_first(prices: Sequence[Sequence[int]], number: int, size: int) -> list[int]:
    left = list(range(len(prices)))
    seats: list[int] = []
    while len(seats) < number * size:
        near = prices[seats[-1]] if len(seats) % size else [0] * len(prices)
        seats.append(min(left, key=lambda m: (near[m], m)))
        left.remove(seats[-1])
    return [*seats, *left]


class _Labels:
    """The stages of the groups' relays: groups with the most microbatches choose first."""

    def __init__(
        self, legal: Legal, groups: Sequence[Sequence[int]], quotas: Mapping[int, int]
    ) -> None:
        self.problem = problem = legal.problem
        self.orders = legal.orders
        self.groups = sorted(groups, key=lambda group: -quotas[group[0]])
        self.quotas = [quotas[group[0]] for group in self.groups]
        self.machines_left = [problem.stage_sizes[0] - len(groups), *problem.stage_sizes[1:]]
        self.visits = [0] * problem.num_stages
        self.stages: dict[int, int] = {}
        self.steps = 0

    def found(self, spare: Sequence[int]) -> tuple[int, ...] | None:
        if not self._choose(0):
            return None
        left = [stage for stage, count in enumerate(self.machines_left) for _ in range(count)]
        stages = {**self.stages, **dict(zip(spare, left, strict=True))}
        return tuple(stages.get(machine, 0) for machine in range(len(self.problem.peers)))

    def _choose(self, depth: int) -> bool:
        if depth == len(self.groups):
            return True
        fitting = [
            order for order in self.orders if all(self.machines_left[stage] for stage in order)
        ]
        # Those whose stages have the fewest visits first.
        for order in sorted(fitting, key=lambda o: (sum(self.visits[s] for s in o), o)):
            self.steps += 1
            if self.steps > MAX_LABEL_STEPS:
                return False
            self._take(order, self.quotas[depth], 1)
            if self._choose(depth + 1):
                self.stages.update(zip(self.groups[depth][1:], order, strict=True))
                return True
            self._take(order, self.quotas[depth], -1)
        return False

    def _take(self, order: Stages, quota: int, sign: int) -> None:
        for stage in order:
            self.machines_left[stage] -= sign
            self.visits[stage] += sign * quota


# --- moves ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Moves:
    """Small changes of a plan, for the gain of a data peer; None where no change can be made."""

    draws: Draws
    legal: Legal

    def change_relay(self, plan: Plan, origin: int) -> Plan | None:
        place, path = self._pick(plan, origin)
        at = self.draws.below(len(path))
        stage = plan.stages[path[at]]
        replicas = [m for m, s in enumerate(plan.stages) if s == stage and m != path[at]]
        if not replicas:
            return None
        other = self.draws.of(replicas)
        return put(plan, [(origin, place, (*path[:at], other, *path[at + 1 :]))])

    def exchange_stage(self, plan: Plan, origin: int) -> Plan | None:
        place, path = self._pick(plan, origin)
        their_origin = self.any_sender(plan)
        their_place, theirs = self._pick(plan, their_origin)
        ours, other = ({plan.stages[m]: m for m in each} for each in (path, theirs))
        ours_alone, theirs_alone = sorted(ours.keys() - other), sorted(other.keys() - ours)
        if not ours_alone or not theirs_alone:
            return None
        give, take = self.draws.of(ours_alone), self.draws.of(theirs_alone)
        ours[take], other[give] = other.pop(take), ours.pop(give)
        mine = self.legal.cheapest(origin, {stage: [m] for stage, m in ours.items()})
        their = self.legal.cheapest(their_origin, {stage: [m] for stage, m in other.items()})
        if mine is None or their is None:
            return None
        return put(plan, [(origin, place, mine[1]), (their_origin, their_place, their[1])])

    def exchange_path(self, plan: Plan, origin: int) -> Plan | None:
        place, path = self._pick(plan, origin)
        their_origin = self.any_sender(plan)
        their_place, theirs = self._pick(plan, their_origin)
        if path == theirs:
            return None
        return put(plan, [(origin, place, theirs), (their_origin, their_place, path)])

    def exchange_machines(self, plan: Plan, origin: int) -> Plan | None:
        """Let two machines take over all that the other does, one of them in a path of ours."""
        one = self.draws.of([origin, *self._pick(plan, origin)[1]])
        other = self.draws.below(len(plan.stages))
        if plan.stages[one] == plan.stages[other]:
            return None
        names = {one: other, other: one}
        now = [names.get(machine, machine) for machine in range(len(plan.stages))]
        return Plan(
            tuple(plan.stages[machine] for machine in now),
            tuple(
                tuple(tuple(now[relay] for relay in path) for path in plan.paths[machine])
                for machine in now
            ),
        )

    def shift_quota(self, plan: Plan, origin: int) -> Plan | None:
        receiver = self.draws.of(plan.data_peers())
        if receiver == origin:
            return None
        return shifted(plan, origin, self.draws.below(len(plan.paths[origin])), receiver)

    def any_sender(self, plan: Plan) -> int:
        return self.draws.of([origin for origin, paths in enumerate(plan.paths) if paths])

    def _pick(self, plan: Plan, origin: int) -> tuple[int, RelayNumbers]:
        place = self.draws.below(len(plan.paths[origin]))
        return place, plan.paths[origin][place]


def put(plan: Plan, changes: Sequence[tuple[int, int, RelayNumbers]]) -> Plan:
    changed = {origin: list(plan.paths[origin]) for origin, _, _ in changes}
    for origin, place, path in changes:
        changed[origin][place] = path
    return plan.with_paths(changed)


def shifted(plan: Plan, origin: int, place: int, receiver: int) -> Plan:
    own = plan.paths[origin]
    rest = (*own[:place], *own[place + 1 :])
    return plan.with_paths({origin: rest, receiver: (*plan.paths[receiver], own[place])})


ChangePlan = Callable[[Moves, Plan, int], Plan | None]
OF_PATHS: Final[tuple[ChangePlan, ...]] = (
    Moves.change_relay, Moves.exchange_stage, Moves.exchange_path
)  # fmt: skip
OF_ALL: Final[tuple[ChangePlan, ...]] = (*OF_PATHS, Moves.exchange_machines, Moves.shift_quota)


# --- the search -----------------------------------------------------------------------------------
CountEvaluations = Callable[[int], None]
"""Is called with the evaluations that have just been spent."""


def uncounted(_: int) -> None:
    """Is told by searches whose progress nobody watches."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, its price, and the iterations simulated for it."""

    plan: Plan
    makespan_us: int
    evaluations: int


class Priced(NamedTuple):
    """The price of a plan.

    Attributes:
        price: what is compared; see the top of the file.
        done_us: when each microbatch is home, data peer by data peer.
        last: the data peer that is home last.
    """

    price: int
    done_us: tuple[int, ...]
    last: int


class _Search:
    """Simulates plans of one problem, at most `most`, and keeps the one that ends first."""

    def __init__(self, problem: Problem, most: int, order: Order, spent: CountEvaluations) -> None:
        self.problem = problem
        self.most = most
        self.simulator = Simulator(problem, order)
        self.evaluations = 0
        self._spent = spent
        self.best: tuple[int, Plan] | None = None
        self.known: dict[Plan, Priced | None] = {}

    def spend(self, evaluations: int) -> None:
        self.evaluations += evaluations
        self._spent(evaluations)

    def price(self, plan: Plan) -> Priced | None:
        """The price of a plan; None if its paths block each other."""
        if plan not in self.known:
            self.known[plan] = self._price(plan)
        return self.known[plan]

    def _price(self, plan: Plan) -> Priced | None:
        self.spend(1)
        jobs = jobs_of(self.problem, plan)
        end_us, done_us = self.simulator.run(jobs)
        if end_us is None:
            return None
        if self.best is None or end_us < self.best[0]:
            self.best = end_us, plan
        last = jobs[done_us.index(max(done_us))].origin
        return Priced(end_us + sum(done_us) // len(done_us), done_us, last)

    def found(self) -> Planned:
        """The best plan. Raises NoPlan: none of those that were tried ends."""
        if self.best is None:
            raise NoPlan("paths wait for each other's slots; give machines more slots")
        end_us, plan = self.best
        return Planned(plan, end_us, self.evaluations)


STANDSTILL: Final = 150
"""Moves without a gain after which a search goes on elsewhere."""
MOST_STARTS: Final = 8
"""Groupings of which a search begins at the best: they differ more than what it gains on one."""
EVALUATIONS_PER_START: Final = 40


def plan_paths(
    problem: Problem,
    stages: tuple[int, ...],
    quotas: Mapping[int, int],
    evaluations: int,
    *,
    seed: int = 0,
    order: Order = Order.ARRIVAL,
    spent: CountEvaluations = uncounted,
) -> Planned:
    """Plan the paths alone, for a given arrangement and given quotas. Raises NoPlan."""
    search = LocalSearch(problem, evaluations, seed, order, spent)
    search.descend(search.dealt(stages, quotas), OF_PATHS)
    return search.found()


def plan(
    problem: Problem, evaluations: int, seed: int = 0, spent: CountEvaluations = uncounted
) -> Planned:
    """Plan arrangement, quotas and paths together. Raises NoPlan."""
    search = LocalSearch(problem, evaluations, seed, Order.ARRIVAL, spent)
    search.descend(search.first_plan(), OF_ALL)
    found = search.found()
    while search.evaluations < evaluations:
        search.spend(len(problem.peers))  # about as long as dealing paths takes
        near = search.dealt_near(found.plan)
        if near is not None:
            search.descend(near, OF_ALL)
            found = search.found()
    return replace(found, evaluations=search.evaluations)


class LocalSearch(_Search):
    def __init__(
        self, problem: Problem, evaluations: int, seed: int, order: Order, spent: CountEvaluations
    ) -> None:
        super().__init__(problem, evaluations, order, spent)
        self.legal = Legal(problem)
        self.draws = Draws(f"{problem.digest()}/{seed}")
        self.moves = Moves(self.draws, self.legal)

    def descend(self, plan: Plan, choice: Sequence[ChangePlan]) -> None:
        now, idle = self.price(plan), 0
        while now is not None and idle < STANDSTILL and self.evaluations < self.most:
            idle += 1
            gaining = now.last if self.draws.below(2) else self.moves.any_sender(plan)
            candidate = self.draws.of(choice)(self.moves, plan, gaining)
            found = None if candidate is None else self.price(candidate)
            if candidate is not None and found is not None and found.price <= now.price:
                idle = 0 if found.price < now.price else idle
                plan, now = candidate, found

    def first_plan(self) -> Plan:
        """The best of some groupings; paths by need where none is legal. Raises NoPlan."""
        starts = max(1, min(MOST_STARTS, self.most // EVALUATIONS_PER_START))
        groupings = (grouped_plan(self.legal, self.draws) for _ in range(starts))
        prices = {plan: found.price for plan in groupings if plan and (found := self.price(plan))}
        if prices:
            return min(prices, key=prices.__getitem__)
        stages = first_arrangement(self.legal)
        return self.dealt(stages, even_quotas(self.problem, stages))

    def dealt_near(self, plan: Plan) -> Plan | None:
        """Paths dealt anew over a plan's arrangement with two machines exchanged."""
        stages = list(plan.stages)
        one, other = self.draws.below(len(stages)), self.draws.below(len(stages))
        stages[one], stages[other] = stages[other], stages[one]
        idle = self.draws.below(self.problem.stage_sizes[0])
        try:
            return self.dealt(tuple(stages), even_quotas(self.problem, stages, idle))
        except NoPlan:
            return None

    def dealt(self, stages: tuple[int, ...], quotas: Mapping[int, int]) -> Plan:
        return first_paths(self.legal, stages, quotas)


def even_quotas(problem: Problem, stages: Sequence[int], idle: int = 0) -> dict[int, int]:
    """Equal quotas of microbatches; the `idle` data peers with the most slots have none."""
    origins = sorted(
        (machine for machine, stage in enumerate(stages) if stage == 0),
        key=lambda machine: problem.peers[machine].slots,
    )
    busy = len(origins) - idle
    share, rest = divmod(problem.microbatches, busy)
    return {o: share + (i < rest) if i < busy else 0 for i, o in enumerate(origins)}


def first_arrangement(legal: Legal) -> tuple[int, ...]:
    """Machines on stages: those with the cheapest company hold the data.

    The others are dealt out stage by stage in the same order, so that each stage has near ones and
    far ones; the search does the rest.
    """
    problem, prices = legal.problem, legal.prices
    near = sorted(
        range(len(problem.peers)), key=lambda m: (sum(sorted(prices[m])[: problem.visited]), m)
    )
    stages = [0] * len(problem.peers)
    rest = near[problem.stage_sizes[0] :]
    left = list(problem.stage_sizes)
    turn = list(range(1, problem.num_stages))
    for machine in rest:
        stage = next(s for s in turn if left[s])
        turn.remove(stage)
        turn.append(stage)
        left[stage] -= 1
        stages[machine] = stage
    return tuple(stages)


# --- mending --------------------------------------------------------------------------------------
def mended(
    problem: Problem,
    plan: Plan,
    evaluations: int,
    order: Order = Order.ARRIVAL,
    spent: CountEvaluations = uncounted,
) -> Planned | None:
    """A plan that is at least as good for this problem; None where the given one is stuck."""
    descent = _Mending(problem, evaluations, order, spent)
    now = descent.price(plan)
    if now is None:
        return None
    descent.run(plan, now)
    return descent.found()


class _Mending(_Search):
    def run(self, plan: Plan, now: Priced) -> None:
        before: Priced | None = None
        while now != before and self.evaluations < self.most:
            before = now
            places = [(origin, place) for origin, place, _ in plan.each()]
            moments = sorted(zip(now.done_us, places, strict=True), key=lambda p: (-p[0], p[1]))
            for _, (origin, place) in moments:  # the last home first
                plan, now = self._improved(plan, origin, place, now)

    def _improved(self, plan: Plan, origin: int, place: int, now: Priced) -> tuple[Plan, Priced]:
        for candidate in _neighbours(self.problem, plan, origin, place):
            if self.evaluations >= self.most:
                break
            found = self.price(candidate)
            if found is not None and found.price < now.price:
                return candidate, found
        return plan, now


def _neighbours(problem: Problem, plan: Plan, origin: int, place: int) -> Iterator[Plan]:
    """A microbatch with another machine at one seat, those with the least to do first."""
    if place >= len(plan.paths[origin]):
        return  # another one has moved to another data peer
    path, load_us = plan.paths[origin][place], Counter[int]()
    for sender, _, relays in plan.each():
        for machine in (sender, *relays):
            load_us[machine] += problem.peers[machine].forward_us
    for seat, machine in enumerate((origin, *path)):
        stage = plan.stages[machine]
        others = [m for m, held in enumerate(plan.stages) if held == stage and m != machine]
        for other in sorted(others, key=lambda m: (load_us[m], m)):
            if seat:
                yield put(plan, [(origin, place, (*path[: seat - 1], other, *path[seat:]))])
            else:
                yield shifted(plan, origin, place, other)
