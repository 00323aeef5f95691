"""Re-planning: the plan for a new snapshot, from the plan before, with few moves of stages.

A snapshot changes in four ways: machines go, machines come, links change, speeds change. A plan
made anew for each would be about as good on every machine, and would put most of them on another
stage, whose state is gigabytes. Here the plan before is repaired, then improved as far as it pays:

1. Same names, same machines: everything is carried over by name, for numbers change.
2. Repair. A stage that nobody is left of gets a newcomer, or the least busy machine of the stage
   with the most. The work of every machine that went goes to replicas of its stage (takeover.py).
   What this gives without newcomers is run while they fetch their state.
3. Newcomers, one by one, get the stage with which the plan's price is lowest: fetching its state
   is in the price (state_moves.py).
4. Paths and quotas are searched with machines as they stand: the plan without free moves.
5. Machines may change their stages, too, at their price: the plan with moves. The search begins at
   the plan of 4, again at older plans that the caller knows (machines that come back may find
   their places), and at groups made from nothing (grouping.py), which pay where the horizon is
   long. Machines that can keep their stage at no loss then do: one of two equal machines moves
   for nothing. The plan with moves is taken only if its price is lower by the least gain.
6. If nobody came or went and not even the better of the two gains that much over the plan before,
   that plan stands: noise on links moves nothing, and the same snapshot gives the same plan.

`stage_sizes` of the new snapshot say how many stages there are; how many machines hold each is
decided here, and the problem that comes back says it. Where a repaired plan breaks a limit (fewer
slots, other rules, other microbatches) its arrangement is kept and paths are dealt out from the
start; where that fails too, everything is planned anew.

The search draws from the digests of the new snapshot, of the plan before and of older ones: peers
that agree on these, on the terms and on the budget come to the same plan, byte for byte. The plan
before is part of what they must agree on.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from protocol.errors import LocalProtocolError

from .assignment import NoPlan
from .checker import violations
from .draft import Draft, fits
from .grouping import grouped_draft
from .moves import OF_ALL, OF_PATHS, Move, Moves, exchanged, shift_quota
from .plan import Plan, jobs_of
from .planner import Budget, Planned, Search, first_that_fits, plan
from .problem import THOUSAND, Problem
from .simulator import Order
from .state_moves import MoveTerms, StateMove, StateMoves
from .takeover import NOBODY, Takeover

NEAR: Final = 3
"""Machines tried in exchange for one that could keep its stage."""
FIXED: Final[tuple[Move, ...]] = (*OF_PATHS, shift_quota, shift_quota)
"""Moves that leave machines where they are."""
BRIEF: Final = Budget(evaluations=1500)
"""How much a re-plan is searched by default."""


@dataclass(frozen=True, slots=True)
class Replanned:
    """A plan for the new snapshot.

    Attributes:
        problem: the snapshot with as many machines on each stage as the plan has.
        makespan_us: of an iteration, moves not counted.
        moves: machines that must fetch a stage, newcomers among them.
        cost_us: what the moves cost once (state_moves.py).
        evaluations: iterations simulated.
    """

    problem: Problem
    plan: Plan
    makespan_us: int
    moves: tuple[StateMove, ...]
    cost_us: int
    evaluations: int


def replan(
    problem: Problem,
    previous: Plan,
    now: Problem,
    terms: MoveTerms,
    budget: Budget | None = None,
    order: Order = Order.ARRIVAL,
    known: Sequence[tuple[Problem, Plan]] = (),
) -> Replanned:
    """Plan for the snapshot `now`, from the plan before and the problem that it was made for.

    Args:
        known: older plans and their problems, from which the search begins, too.

    Raises:
        NoPlan: there is none for these machines.
    """
    return _Replanning(problem, previous, now, terms, budget or BRIEF, order, known).planned()


class _Replanning:
    """One re-plan."""

    def __init__(
        self,
        problem: Problem,
        previous: Plan,
        now: Problem,
        terms: MoveTerms,
        budget: Budget,
        order: Order,
        known: Sequence[tuple[Problem, Plan]],
    ) -> None:
        if problem.num_stages != now.num_stages:
            raise LocalProtocolError("another number of stages is another model's; plan anew")
        self.now = now
        self.terms = terms
        self.budget = budget
        self.order = order
        names = [older.digest(its_problem) for its_problem, older in known]
        seed = "/".join((now.digest(), previous.digest(problem), *names))
        self.search = Search(now, budget, order, seed)
        self.takeover = Takeover(now, self.search.simulator, self.search.prices)
        self.same = previous if problem.digest() == now.digest() else None
        self.carried = carried_over(problem, previous, now)
        before = self.carried.stages[: len(now.peers)]
        self.newcomers = [m for m, stage in enumerate(before) if stage == NOBODY]
        self.gone = len(self.carried.stages) > len(before)
        self.known = [carried_over(its_problem, older, now) for its_problem, older in known]
        self.moves = StateMoves(now, before, terms)

    def planned(self) -> Replanned:
        if self.same is not None:
            return self._told(self.same)
        repaired = self._repaired(self.carried)
        stands = self.search.price(repaired)
        if not self.moves.of(repaired.stages):
            self.moves.meanwhile_us = stands[1] if stands else None
        self.search.surcharge = self.moves.surcharge
        try:
            fixed, free = self._improved(self._legal_or_dealt(self._settled(repaired)))
        except NoPlan:
            found = plan(self.now, self.budget, self.order)
            self.search.evaluations += found.evaluations
            return self._told(found.plan)
        chosen = free if self._gains(free.makespan_us, fixed.makespan_us) else fixed
        unchanged = not self.newcomers and not self.gone and stands and self._legal(repaired)
        if unchanged and stands and not self._gains(chosen.makespan_us, stands[1]):
            return self._told(repaired.to_plan())
        return self._told(chosen.plan)

    def _repaired(self, draft: Draft) -> Draft:
        """A plan without the machines that went; newcomers have no stage."""
        for stage in range(self.now.num_stages):
            if not self.takeover.holders(draft, stage):
                draft = self._filled(draft, stage)
        gone = range(len(self.now.peers), len(draft.stages))
        relays = [m for m in gone if draft.stages[m] != 0]
        origins = [m for m in gone if draft.stages[m] == 0]
        for machine in (*relays, *origins):  # paths are whole again before anybody takes them over
            relieved = self.takeover.relieve(draft, machine)
            if relieved is None:
                raise LocalProtocolError(f"stage {draft.stages[machine]} was filled and is empty")
            draft = relieved
        return Draft(draft.stages[: len(self.now.peers)], draft.paths)

    def _filled(self, draft: Draft, stage: int) -> Draft:
        """Give a stage that nobody is left of a newcomer, or the least busy machine of the rest."""
        visits = Counter(machine for _, _, path in draft.each() for machine in path)
        visits.update({origin: len(paths) for origin, paths in draft.paths.items()})
        holders = {
            m: len(self.takeover.holders(draft, held)) if held != NOBODY else THOUSAND
            for m, held in enumerate(draft.stages[: len(self.now.peers)])
        }
        machine = min(holders, key=lambda m: (-holders[m], visits[m], m))
        free = self.takeover.relieve(draft, machine)
        if free is None:
            raise NoPlan(f"nobody is left for stage {stage}; fewer stages need fewer machines")
        return self.takeover.place(free, machine, stage)

    def _settled(self, draft: Draft) -> Draft:
        """Every newcomer on the stage with which the price is lowest."""
        stages = range(self.now.num_stages)
        for machine, held in enumerate(draft.stages):
            if held != NOBODY:
                continue
            draft = min(
                (self.takeover.employ(draft, machine, stage) for stage in stages), key=self._price
            )
        return draft

    def _price(self, draft: Draft) -> tuple[int, int]:
        """What `min` compares; drafts that never end come last."""
        found = self.search.price(draft)
        return (1, 0) if found is None else (0, found[0])

    def _legal_or_dealt(self, draft: Draft) -> Draft:
        if self._legal(draft) and self.search.price(draft) is not None:
            return draft
        return first_that_fits(self.search, draft.stages)

    def _improved(self, draft: Draft) -> tuple[Planned, Planned]:
        """The best plan without free moves, and the best with them; their ends have the price."""
        fixed = self.search.improve(draft, FIXED, self._share())
        if not self.moves.of(fixed.plan.stages):
            self.moves.meanwhile_us = fixed.makespan_us
        choice: tuple[Move, ...] = (*OF_ALL, self._change_stage, self._change_stage)
        starts = [draft_of(fixed.plan), *self._older(), *self._grouped()]
        found = [self.search.improve(start, choice, self._share()) for start in starts]
        best = min(found, key=lambda planned: planned.makespan_us)
        return fixed, self._home(best)

    def _share(self) -> int:
        """What one search may evaluate, from here on."""
        share = self.budget.evaluations // (3 + len(self.known))
        return self.search.evaluations + max(1, share)

    def _older(self) -> Iterator[Draft]:
        """Older plans, repaired like the plan before."""
        for carried in self.known:
            draft = self._settled(self._repaired(carried))
            if self._legal(draft) and self.search.price(draft) is not None:
                yield draft

    def _grouped(self) -> Iterator[Draft]:
        """A start from nothing, if there is one: with a long horizon it may pay."""
        search, budget = self.search, self.budget
        problem = resized(self.now, _likely_stages(self.now))
        draws, tries = search.moves.draws, budget.rough_tries
        draft = grouped_draft(problem, search.prices, search.orders, draws, tries, budget.memory)
        if draft is not None and search.price(draft) is not None:
            yield draft

    def _home(self, planned: Planned) -> Planned:
        """Bring machines back to the stages that they held, where that makes nothing worse."""
        draft, price_us = draft_of(planned.plan), planned.makespan_us
        for machine, stage in enumerate(self.moves.before):
            if stage in (draft.stages[machine], NOBODY):
                continue
            others = sorted(
                self.takeover.holders(draft, stage),
                key=lambda m: (self.search.prices[machine][m], m),
            )
            for other in others[:NEAR]:
                back = exchanged(draft, machine, other)
                found = self.search.price(back) if fits(self.now, back) else None
                if found is not None and found[1] <= price_us:
                    draft, price_us = back, found[1]
                    break
        return Planned(draft.to_plan(), price_us, self.search.evaluations)

    def _change_stage(self, moves: Moves, draft: Draft, origin: int) -> Draft | None:
        """Let a machine leave its stage for another one."""
        del origin
        machine = moves.draws.below(len(draft.stages))
        stage = moves.draws.below(self.now.num_stages)
        if draft.stages[machine] == stage:
            return None
        return self.takeover.move(draft, machine, stage)

    def _gains(self, price_us: int, than_us: int) -> bool:
        return price_us * THOUSAND <= than_us * (THOUSAND - self.terms.least_gain_permille)

    def _legal(self, draft: Draft) -> bool:
        return not violations(resized(self.now, draft.stages), draft.to_plan())

    def _told(self, chosen: Plan) -> Replanned:
        problem = resized(self.now, chosen.stages)
        makespan_us = self.search.simulator.run(jobs_of(problem, chosen)).makespan_us
        if makespan_us is None:
            raise NoPlan("paths wait for each other's slots; give machines more slots")
        moves = tuple(self.moves.of(chosen.stages))
        cost_us = self.moves.cost_us(chosen.stages, makespan_us)
        return Replanned(problem, chosen, makespan_us, moves, cost_us, self.search.evaluations)


def _likely_stages(problem: Problem) -> list[int]:
    """Stages in numbers that fit groups: a data peer for each path, relays evenly."""
    number, relays = len(problem.peers), problem.num_stages - 1
    origins = max(1, min(number // problem.visited, number - relays))
    return [0] * origins + [1 + place % relays for place in range(number - origins)]


def resized(problem: Problem, stages: Sequence[int]) -> Problem:
    """The problem with as many machines on each stage as there are."""
    sizes = tuple(list(stages).count(stage) for stage in range(problem.num_stages))
    return problem if sizes == problem.stage_sizes else replace(problem, stage_sizes=sizes)


def carried_over(problem: Problem, previous: Plan, now: Problem) -> Draft:
    """The plan before in the numbers of the new snapshot.

    Newcomers have no stage; machines that went stand behind the others, with theirs.
    """
    here = {peer.name: number for number, peer in enumerate(now.peers)}
    gone = [peer.name for peer in problem.peers if peer.name not in here]
    here.update({name: len(now.peers) + place for place, name in enumerate(gone)})
    numbers = [here[peer.name] for peer in problem.peers]
    stages = [NOBODY] * len(here)
    for number, stage in zip(numbers, previous.stages, strict=True):
        stages[number] = stage
    paths = {
        numbers[origin]: tuple(tuple(numbers[relay] for relay in path) for path in paths)
        for origin, paths in enumerate(previous.paths)
        if previous.stages[origin] == 0
    }
    return Draft(tuple(stages), paths)


def draft_of(chosen: Plan) -> Draft:
    """A plan as a draft."""
    return Draft(
        chosen.stages, {m: chosen.paths[m] for m, stage in enumerate(chosen.stages) if stage == 0}
    )
