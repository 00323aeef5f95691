"""The planner: arrangement, quotas and paths for a problem, the same on every machine.

Idea:
1. Legal orders of stages are enumerated.
2. The start. For paths alone, a first draft assigns min-max (drafts.py): the dearest data
   peers choose first. For all together, data peers get near relays of their own;
   of several such starts the one with the best price is taken: they differ more than what a
   longer search gains on one of them.
3. Local search: a move changes the draft a little, and the event simulator says what it
   is worth. Moves begin mostly at the data peer that comes home last. A draft is simulated only
   if a bound does not rule it out: no track is faster than its paths without any company.
4. Late acceptance (Burke and Bykov 2017): a draft is taken if it is no worse than the current one,
   or than the current one was MEMORY tries ago. There is no temperature to tune and no fraction
   to round, so all machines walk the same way.

The price of a draft is EMPHASIS times the moment at which the last microbatch is done, plus the
mean moment over all of them: a plateau of equal ends still has a slope. The draft that is kept is
the one that ends first.

Everything is an integer, draws are seeded with the problem's digest, and the budget is counted in
evaluations, never in seconds.

Moves are small changes of a draft that keep it nearly legal. Paths alone change with those of
OF_PATHS, arrangement and quotas with the others. A move returns None where it has nothing to
change.

Mending: a plan that is there, made to fit a problem that has changed a little.

Idea: microbatches move one by one to another machine of the same stage, at first those that come
home last, and a move stays if the simulated iteration is better for it. Stages stay where they are.
It is a plain descent, so it finishes what the planner's search leaves: on eight machines, short
searches with a descent behind each end lower than a long one of as many simulated iterations.

The budget is counted in simulated iterations.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Final, NamedTuple

from .drafts import MEMORY, Legal, NoPlan, first_draft, grouped_draft
from .problem import Draws, Problem, Relays, cheapest_relays
from .simulator import Order, Plan, PlanDraft, Simulator, fits, jobs_of, least_us

# --- moves ----------------------------------------------------------------------------------------
Move = Callable[["Moves", PlanDraft, int], PlanDraft | None]
"""Takes a draft and the data peer that should gain by it."""


@dataclass(frozen=True, slots=True)
class Moves:
    """What moves draw from."""

    draws: Draws
    legal: Legal

    def pick(self, draft: PlanDraft, origin: int) -> tuple[int, Relays]:
        """One of a data peer's microbatches."""
        place = self.draws.below(len(draft.paths[origin]))
        return place, draft.paths[origin][place]

    def pick_any(self, draft: PlanDraft) -> tuple[int, int, Relays]:
        """One of all microbatches."""
        origin = self.draws.of([o for o, paths in draft.paths.items() if paths])
        return (origin, *self.pick(draft, origin))

    def ordered(self, draft: PlanDraft, origin: int, relays: Sequence[int]) -> Relays | None:
        """These machines in their cheapest legal order."""
        by_stage = {draft.stages[relay]: relay for relay in relays}
        found = [
            cheapest_relays(origin, [[by_stage[stage]] for stage in order], self.legal.prices)
            for order in self.legal.by_set.get(frozenset(by_stage), ())
        ]
        best = min(filter(None, found), default=None)
        return best[1] if best else None


def put(draft: PlanDraft, changes: Sequence[tuple[int, int, Relays]]) -> PlanDraft:
    """Other paths at these places."""
    changed = {origin: list(draft.paths[origin]) for origin, _, _ in changes}
    for origin, place, path in changes:
        changed[origin][place] = path
    return draft.with_paths({origin: tuple(paths) for origin, paths in changed.items()})


def change_relay(moves: Moves, draft: PlanDraft, origin: int) -> PlanDraft | None:
    """Take another replica of one stage."""
    place, path = moves.pick(draft, origin)
    at = moves.draws.below(len(path))
    stage = draft.stages[path[at]]
    replicas = [m for m, s in enumerate(draft.stages) if s == stage and m != path[at]]
    if not replicas:
        return None
    other = moves.draws.of(replicas)
    changes = [(origin, place, (*path[:at], other, *path[at + 1 :]))]
    if moves.draws.below(4):
        users = [each for each in draft.each() if other in each[2] and path[at] not in each[2]]
        if users:
            their_origin, their_place, theirs = moves.draws.of(users)
            if (their_origin, their_place) != (origin, place):
                swapped = tuple(path[at] if m == other else m for m in theirs)
                changes.append((their_origin, their_place, swapped))
    return put(draft, changes)


def reorder(moves: Moves, draft: PlanDraft, origin: int) -> PlanDraft | None:
    """Visit the same machines in another order."""
    place, path = moves.pick(draft, origin)
    by_stage = {draft.stages[relay]: relay for relay in path}
    order = moves.draws.of(moves.legal.by_set[frozenset(by_stage)])
    other = tuple(by_stage[stage] for stage in order)
    return put(draft, [(origin, place, other)]) if other != path else None


def exchange_stage(moves: Moves, draft: PlanDraft, origin: int) -> PlanDraft | None:
    """Trade a stage of one path for a stage of another."""
    place, path = moves.pick(draft, origin)
    their_origin, their_place, theirs = moves.pick_any(draft)
    stages = draft.stages
    ours_alone = [m for m in path if stages[m] not in {stages[t] for t in theirs}]
    theirs_alone = [m for m in theirs if stages[m] not in {stages[o] for o in path}]
    if not ours_alone or not theirs_alone:
        return None
    give, take = moves.draws.of(ours_alone), moves.draws.of(theirs_alone)
    mine = moves.ordered(draft, origin, [take if m == give else m for m in path])
    other = moves.ordered(draft, their_origin, [give if m == take else m for m in theirs])
    if mine is None or other is None:
        return None
    return put(draft, [(origin, place, mine), (their_origin, their_place, other)])


def exchange_path(moves: Moves, draft: PlanDraft, origin: int) -> PlanDraft | None:
    """Trade a whole path for another one."""
    place, path = moves.pick(draft, origin)
    their_origin, their_place, theirs = moves.pick_any(draft)
    if path == theirs:
        return None
    return put(draft, [(origin, place, theirs), (their_origin, their_place, path)])


def exchange_place(moves: Moves, draft: PlanDraft, origin: int) -> PlanDraft | None:
    """Let two microbatches of one data peer change places."""
    place, path = moves.pick(draft, origin)
    other_place, other = moves.pick(draft, origin)
    if path == other:
        return None
    return put(draft, [(origin, place, other), (origin, other_place, path)])


def exchange_machines(moves: Moves, draft: PlanDraft, origin: int) -> PlanDraft | None:
    """Let two machines take over all that the other does."""
    number = len(draft.stages)
    one = moves.draws.below(number)
    if moves.draws.below(2):  # a machine that the late data peer depends on
        one = moves.draws.of([origin, *moves.pick(draft, origin)[1]])
    other = moves.draws.below(number)
    if draft.stages[one] == draft.stages[other]:
        return None
    return exchanged(draft, one, other)


def exchanged(draft: PlanDraft, one: int, other: int) -> PlanDraft:
    """Two machines in each other's place: stages, paths and microbatches."""
    stages = list(draft.stages)
    stages[one], stages[other] = stages[other], stages[one]
    other_name = {one: other, other: one}
    paths = {
        other_name.get(o, o): tuple(
            tuple(other_name.get(m, m) for m in path) if one in path or other in path else path
            for path in paths
        )
        for o, paths in draft.paths.items()
    }
    return PlanDraft(tuple(stages), paths)


def shift_quota(moves: Moves, draft: PlanDraft, origin: int) -> PlanDraft | None:
    """Give a microbatch, with its path, to another data peer."""
    receiver = moves.draws.of(sorted(draft.paths))
    if receiver == origin:
        return None
    place, path = moves.pick(draft, origin)
    left = draft.paths[origin][:place] + draft.paths[origin][place + 1 :]
    return draft.with_paths({origin: left, receiver: (*draft.paths[receiver], path)})


OF_PATHS: tuple[Move, ...] = (
    change_relay, change_relay, change_relay, reorder, exchange_stage, exchange_path, exchange_place
)  # fmt: skip
OF_ALL: tuple[Move, ...] = (
    *OF_PATHS, exchange_machines, exchange_machines, exchange_machines, shift_quota, shift_quota
)  # fmt: skip


# --- the search -----------------------------------------------------------------------------------
EMPHASIS: Final = 8
PATIENCE: Final = 8
"""Lengths of MEMORY without a better draft after which the search goes on elsewhere."""
PATIENCE_PER_PAIR: Final = 4
"""Tries for each pair of machines, after which it does, too: few machines have few neighbours."""
KICKS: Final = 10
KICKED_MOVES: Final = 3
MOST_STARTS: Final = 8
EVALUATIONS_PER_START: Final = 100
TRIES_PER_EVALUATION: Final = 30
"""Moves drawn at most for each evaluation of the budget: bounds the search where all are ruled
out."""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """How much to search.

    Attributes:
        evaluations: iterations simulated, at most.
        seed: another one walks another way.
    """

    evaluations: int = 3000
    seed: int = 0

    @property
    def starts(self) -> int:
        """Groupings to choose from: a tenth of the search or less is spent on each."""
        return max(1, min(MOST_STARTS, self.evaluations // EVALUATIONS_PER_START))


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its price.

    Attributes:
        evaluations: iterations simulated.
    """

    plan: Plan
    makespan_us: int
    evaluations: int


class Priced(NamedTuple):
    """What a draft costs.

    Attributes:
        price: what is compared.
        end_us: of the iteration.
        done_us: when each microbatch is home, data peer by data peer.
        last: the data peer that is home last.
    """

    price: int
    end_us: int
    done_us: tuple[int, ...]
    last: int


class _Pricing:
    """Simulates drafts of one problem, and counts them."""

    def __init__(self, problem: Problem, order: Order) -> None:
        self.problem = problem
        self.simulator = Simulator(problem, order)
        self.evaluations = 0

    def price(self, draft: PlanDraft) -> Priced | None:
        """What it costs; None if it is stuck."""
        self.evaluations += 1
        jobs = jobs_of(self.problem, draft.to_plan())
        end_us, done_us = self.simulator.run(jobs)
        if end_us is None:
            return None
        last = jobs[done_us.index(max(done_us))].origin
        mean_us = sum(done_us) // len(done_us)
        return Priced(EMPHASIS * end_us + mean_us, end_us, done_us, last)


def plan_paths(
    problem: Problem,
    stages: tuple[int, ...],
    quotas: Mapping[int, int],
    budget: SearchBudget | None = None,
    order: Order = Order.ARRIVAL,
) -> Planned:
    """Plan the paths alone, for a given arrangement and given quotas. Raises NoPlan."""
    search = Search(problem, budget or SearchBudget(), order)
    return search.improve(search.start(stages, quotas), OF_PATHS)


def plan(problem: Problem, budget: SearchBudget | None = None) -> Planned:
    """Plan arrangement, quotas and paths together. Raises NoPlan."""
    search = Search(problem, budget or SearchBudget(), Order.ARRIVAL)
    return search.improve(_best_start(search), OF_ALL)


def _best_start(search: "Search") -> PlanDraft:
    """The best of several groupings; paths by need where groups are too few or not legal.

    The others are kept, for a search that stands still.

    Raises:
        NoPlan
    """
    problem, budget = search.problem, search.budget
    starts: dict[int, tuple[PlanDraft, Priced]] = {}
    for _ in range(budget.starts):
        draft = grouped_draft(search.legal, search.moves.draws)
        if draft is not None and (found := search.price(draft)) is not None:
            starts.setdefault(found.price, (draft, found))
    if not starts or problem.stage_sizes[0] * problem.visited > len(problem.peers):
        try:
            draft = _some_arrangement_that_fits(search)
        except NoPlan:
            if not starts:
                raise
        else:
            if (found := search.price(draft)) is not None:
                starts.setdefault(found.price, (draft, found))
            elif not starts:
                return draft
    (draft, _), *search.starts = (starts[price] for price in sorted(starts))
    return draft


def _some_arrangement_that_fits(search: "Search") -> PlanDraft:
    """A first draft of one of two arrangements.

    With the fewest slots at the data peers, one of them alone never asks too much of a relay.

    Raises:
        NoPlan
    """
    near, modest = (
        first_arrangement(search.legal, fewest_slots=fewest_slots) for fewest_slots in (False, True)
    )
    try:
        return first_that_fits(search, near)
    except NoPlan:
        return first_that_fits(search, modest)


def first_that_fits(search: "Search", stages: tuple[int, ...]) -> PlanDraft:
    """A first draft with as many data peers at work as the relays' slots allow.

    Raises:
        NoPlan: not even for one.
    """
    for idle in range(stages.count(0)):
        quotas = even_quotas(search.problem, stages, idle)
        try:
            return search.start(stages, quotas)
        except NoPlan as error:
            refusal = error
    raise refusal


def even_quotas(problem: Problem, stages: Sequence[int], idle: int = 0) -> dict[int, int]:
    """The same number of microbatches for each data peer but `idle` with the most slots."""
    origins = sorted(
        (machine for machine, stage in enumerate(stages) if stage == 0),
        key=lambda machine: problem.peers[machine].slots,
    )
    busy = len(origins) - idle
    share, rest = divmod(problem.microbatches, busy)
    return {o: share + (i < rest) if i < busy else 0 for i, o in enumerate(origins)}


def first_arrangement(legal: Legal, *, fewest_slots: bool = False) -> tuple[int, ...]:
    """Machines on stages: those with the cheapest company, or the fewest slots, hold the data.

    The others are dealt out stage by stage in the same order, so that each stage has near ones and
    far ones; the search does the rest.
    """
    problem, prices = legal.problem, legal.prices
    near = sorted(
        range(len(problem.peers)),
        key=lambda m: (
            problem.peers[m].slots if fewest_slots else 0,
            sum(sorted(prices[m])[: problem.visited]),
            m,
        ),
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


class Search(_Pricing):
    """One local search."""

    def __init__(self, problem: Problem, budget: SearchBudget, order: Order) -> None:
        super().__init__(problem, order)
        self.budget = budget
        self.legal = Legal(problem)
        self.moves = Moves(Draws(f"{problem.digest()}/{budget.seed}"), self.legal)
        self.starts: list[tuple[PlanDraft, Priced]] = []
        self.least_us = cache(partial(least_us, self.simulator))

    def start(self, stages: tuple[int, ...], quotas: Mapping[int, int]) -> PlanDraft:
        """A first draft that ends: without swaps, where with them it would block itself.

        Paths that visit stages in rising order cannot wait for each other in a circle.

        Raises:
            NoPlan
        """
        draft = first_draft(self.legal, stages, quotas)
        if self.price(draft) is None:
            return first_draft(self.legal, stages, quotas, rising=True)
        return draft

    def improve(self, draft: PlanDraft, choice: Sequence[Move]) -> Planned:
        """Search from this draft on, until the budget is used up. Raises NoPlan: it never ends."""
        now = self.price(draft)
        if now is None:
            raise NoPlan("paths wait for each other's slots; give machines more slots")
        current, best, best_us, gained = draft, draft, now.end_us, 0
        pairs = len(draft.stages) ** 2
        patience = min(PATIENCE * MEMORY, PATIENCE_PER_PAIR * pairs)
        history = [now.price] * MEMORY
        most = self.budget.evaluations
        for attempt in range(most * TRIES_PER_EVALUATION):
            if self.evaluations >= most:
                break
            place = attempt % len(history)
            limit = max(history[place], now.price)
            candidate = self._draw(current, choice, now.last)
            if candidate is not None and self._may_be(candidate, limit):
                found = self.price(candidate)
                if found is not None and found.price <= limit:
                    current, now = candidate, found
                    if now.end_us < best_us:
                        best, best_us, gained = current, now.end_us, attempt
            history[place] = min(history[place], now.price)
            if attempt - gained >= patience:
                current, now = self._elsewhere(best, choice)
                history, gained = [now.price] * MEMORY, attempt
                if now.end_us < best_us:
                    best, best_us = current, now.end_us
        return Planned(best.to_plan(), best_us, self.evaluations)

    def _elsewhere(self, best: PlanDraft, choice: Sequence[Move]) -> tuple[PlanDraft, Priced]:
        """Where a search that stands still goes on: at the next start, or near to the best draft.

        Near are its arrangement with a few machines exchanged and paths dealt anew, as single moves
        do not lead from slots that fit one arrangement to those of another, and a few moves that
        nobody asked what they cost.
        """
        if self.starts:
            return self.starts.pop(0)
        draws = self.moves.draws
        for _ in range(KICKS):
            anew = choice is OF_ALL and draws.below(2)
            draft = self._dealt_anew(best) if anew else self._kicked(best, choice)
            if draft is not None and (found := self.price(draft)) is not None:
                return draft, found
        found = self.price(best)
        assert found is not None  # it is the best of those that end
        return best, found

    def _dealt_anew(self, best: PlanDraft) -> PlanDraft | None:
        draws, stages = self.moves.draws, list(best.stages)
        for _ in range(1 + draws.below(KICKED_MOVES)):
            one, other = draws.below(len(stages)), draws.below(len(stages))
            stages[one], stages[other] = stages[other], stages[one]
        idle = draws.below(self.problem.stage_sizes[0])
        try:
            return self.start(tuple(stages), even_quotas(self.problem, stages, idle))
        except NoPlan:
            return None

    def _kicked(self, best: PlanDraft, choice: Sequence[Move]) -> PlanDraft | None:
        draft = best
        for _ in range(KICKED_MOVES):
            moved = self._draw(draft, choice, self.moves.pick_any(draft)[0])
            draft = moved if moved is not None else draft
        return draft if fits(self.problem, draft) else None

    def _draw(self, draft: PlanDraft, choice: Sequence[Move], last: int) -> PlanDraft | None:
        draws = self.moves.draws
        gaining = last
        if draws.below(2):
            gaining = draws.of([o for o in sorted(draft.paths) if draft.paths[o]])
        return draws.of(choice)(self.moves, draft, gaining)

    def _may_be(self, draft: PlanDraft, limit: int) -> bool:
        """Whether a draft is legal and could come out below the limit."""
        least = max(self.least_us(origin, paths) for origin, paths in draft.paths.items())
        return EMPHASIS * least <= limit and fits(self.problem, draft)


# --- mending --------------------------------------------------------------------------------------
def mended(
    problem: Problem, plan: Plan, evaluations: int, order: Order = Order.ARRIVAL
) -> Planned | None:
    """A plan that is at least as good for this problem; None where the given one is stuck."""
    return _Descent(problem, order, plan).done(evaluations)


class _Descent(_Pricing):
    """One descent."""

    def __init__(self, problem: Problem, order: Order, plan: Plan) -> None:
        super().__init__(problem, order)
        self.draft = plan.to_draft()
        self.holders = [
            [m for m, held in enumerate(plan.stages) if held == stage]
            for stage in range(problem.num_stages)
        ]

    def done(self, most: int) -> Planned | None:
        found = self.price(self.draft)
        while found is not None and self.evaluations < most:
            before = found.price
            each = [(origin, place) for origin, place, _ in self.draft.each()]
            moments = sorted(zip(found.done_us, each, strict=True), key=lambda p: (-p[0], p[1]))
            for _, (origin, place) in moments:  # the last home first
                found = self._improved(origin, place, found, most)
            if found.price == before:
                break
        return found and Planned(self.draft.to_plan(), found.end_us, self.evaluations)

    def _improved(self, origin: int, place: int, best: Priced, most: int) -> Priced:
        """Move one microbatch to the first machine with which the iteration is better."""
        for candidate in self._moves(origin, place):
            if self.evaluations >= most:
                break
            found = self.price(candidate) if fits(self.problem, candidate) else None
            if found is not None and found.price < best.price:
                self.draft = candidate
                return found
        return best

    def _moves(self, origin: int, place: int) -> Iterator[PlanDraft]:
        """A microbatch with another machine at one seat, those with the least to do first."""
        if place >= len(self.draft.paths[origin]):
            return  # another one has moved to another data peer
        path, loads = self.draft.paths[origin][place], self._loads()
        for seat, machine in enumerate((origin, *path)):
            others = [m for m in self.holders[self.draft.stages[machine]] if m != machine]
            for other in sorted(others, key=lambda m: (loads[m], m)):
                yield self._moved(origin, place, path, seat, other)

    def _loads(self) -> Counter[int]:
        """The forwards that each machine has to do, in microseconds."""
        loads: Counter[int] = Counter()
        for origin, _, path in self.draft.each():
            for machine in (origin, *path):
                loads[machine] += self.problem.peers[machine].forward_us
        return loads

    def _moved(self, origin: int, place: int, path: Relays, seat: int, other: int) -> PlanDraft:
        """A microbatch with another machine at one seat; seat 0 is its data peer's."""
        own = self.draft.paths[origin]
        if seat:
            relays = (*path[: seat - 1], other, *path[seat:])
            return self.draft.with_paths({origin: (*own[:place], relays, *own[place + 1 :])})
        rest = (*own[:place], *own[place + 1 :])
        return self.draft.with_paths({origin: rest, other: (*self.draft.paths[other], path)})
