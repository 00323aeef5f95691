"""A pipeline that is planned and priced: its iterations, and what they amount to.

A SkipPipe whose every k-th iteration skips nothing has two kinds of iterations on one arrangement:
stages stay on their machines, the paths of the k-th are planned for themselves. Its figures are the
mean over k iterations.

What holds an iteration up is told in words. The data peer that is home last decides when the
iteration ends. Its microbatches' time is work, the way over links, or waiting for busy machines,
busy links and slots. Where work and waiting weigh more, the machine that works most is named; where
the way does, the machine of its paths whose links take most of it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .assignment import NoPlan
from .bounds import lower_bound_us
from .effort import Effort, effort_for
from .mending import mended
from .plan import jobs_of
from .planner import Planned, plan, plan_paths
from .problem import US_PER_S, Problem
from .question import (
    CannotPlan,
    Question,
    microbatches_of,
    numbers_of_data_peers,
    problem_of,
)
from .replicas import SECONDS_PER_HOUR, Estimate, cost_per_billion_tokens, state_fits
from .simulator import Job, Outcome, Simulator, Stretch, utilisation


# --- what holds an iteration up -------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What holds an iteration up.

    Attributes:
        machine: the one to help first.
    """

    machine: int
    sentence: str


def bottleneck_of(
    problem: Problem, jobs: Sequence[Job], outcome: Outcome, record: Sequence[Stretch]
) -> Bottleneck:
    """Judge a simulated iteration."""
    names = [peer.name for peer in problem.peers]
    last = jobs[outcome.done_us.index(max(outcome.done_us))].origin
    own = [index for index, job in enumerate(jobs) if job.origin == last]
    started = {index: min(s.start_us for s in record if s.job == index) for index in own}
    total = sum(outcome.done_us[index] - started[index] for index in own)
    work, way, ways = _shares(problem, [jobs[index] for index in own])
    waiting = total - work - way
    busy = Counter[int]()
    for stretch in record:
        busy[stretch.machine] += stretch.end_us - stretch.start_us
    busiest = min(busy, key=lambda m: (-busy[m], m))
    shares = (
        f"{names[last]} is home last; {_percent(way, total)} of its microbatches' time passes on"
        f" links, {_percent(work, total)} in work, {_percent(waiting, total)} in waiting"
    )
    if way >= work + waiting:
        far = min(ways, key=lambda m: (-ways[m], m))
        return Bottleneck(far, f"{shares}. The links of {names[far]} take most of the way")
    makespan = outcome.makespan_us or max(outcome.done_us)
    load = _percent(busy[busiest], makespan)
    return Bottleneck(busiest, f"{shares}. {names[busiest]} works most: {load} of the iteration")


def _shares(problem: Problem, jobs: Sequence[Job]) -> tuple[int, int, Counter[int]]:
    """Work, the way over links, and the way by each machine at either end of a link."""
    simulator, work, way = Simulator(problem), 0, 0
    ways: Counter[int] = Counter()
    for job in jobs:
        for piece in simulator.route(job.origin, job.relays):
            travel = piece.transfer_us + piece.flight_us
            work += piece.work_us
            way += travel
            if travel:
                ways.update({piece.machine: travel, piece.next: travel})
    return work, way, ways


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "0%"


# --- pipelines ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class PricedIteration:
    """One kind of iteration, as it was simulated.

    Attributes:
        next_us: what the second best of the searches ends with, where there was one.
        times: how many of this kind come in turn.
    """

    problem: Problem
    planned: Planned
    record: tuple[Stretch, ...]
    next_us: int = 0
    times: int = 1

    @property
    def jobs(self) -> list[Job]:
        """Its microbatches, as the record numbers them."""
        return jobs_of(self.problem, self.planned.plan)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A planned pipeline and what it would achieve.

    Attributes:
        iterations: the usual one; then the one that skips nothing, if there is one.
        lower_bound_us: of the mean iteration; None where it was not computed.
    """

    iterations: tuple[PricedIteration, ...]
    lower_bound_us: int | None
    estimate: Estimate
    bottleneck: Bottleneck

    @property
    def problem(self) -> Problem:
        """The problem of the usual iteration."""
        return self.iterations[0].problem

    @property
    def planned(self) -> Planned:
        """The plan of the usual iteration."""
        return self.iterations[0].planned


def full_pipeline(question: Question) -> Pipeline:
    """The best that is found when nothing is skipped.

    Raises:
        CannotPlan
    """
    return _put_together(question, [_best(question, question.stages)], bound=False)


def skipping_pipeline(question: Question) -> Pipeline:
    """The best that is found when stages are skipped, but for every k-th iteration if so asked.

    Raises:
        CannotPlan
    """
    every = question.full_every
    if every == 1:
        return _put_together(question, [_best(question, question.stages)])
    usual = _best(question, question.visited)
    if not every or question.visited == question.stages:
        return _put_together(question, [usual])
    unskipped = _unskipped(question, usual)
    return _put_together(question, [replace(usual, times=every - 1), unskipped])


def searched(problem: Problem, effort: Effort, searches: int) -> list[Planned]:
    """Plans by searches with different seeds, each one mended; the best first.

    Raises:
        NoPlan
    """
    first = effort.budget.seed
    budgets = [replace(effort.budget, seed=first + more) for more in range(searches)]
    found = [plan(problem, budget) for budget in budgets]
    ends = [mended(problem, each.plan, effort.mending) or each for each in found]
    return sorted(ends, key=lambda each: each.makespan_us)


def _best(question: Question, visited: int) -> PricedIteration:
    """The best plan with each number of data peers that is tried."""
    effort = effort_for(len(question.offers), question.budget)
    sizes = list(numbers_of_data_peers(question, visited))[: effort.numbers]
    microbatches = microbatches_of(question, visited)
    found: list[PricedIteration] = []
    for number in sizes:
        problem = problem_of(question, visited, number, microbatches)
        try:
            ends = searched(problem, effort, effort.searches)
        except NoPlan:
            continue
        found.append(_simulated(problem, ends[0], ends[min(1, len(ends) - 1)].makespan_us))
    if not found:
        raise CannotPlan(
            f"no legal paths for {question.stages} stages of which {visited} are visited; change"
            " --stages or --visited, raise pipeline.max_jump, or give the machines more slots"
        )
    return min(found, key=lambda each: each.planned.makespan_us)


def _unskipped(question: Question, usual: PricedIteration) -> PricedIteration:
    """An iteration of the same machines on the same stages, with as many microbatches of each."""
    problem = replace(usual.problem, visited=question.stages)
    stages, paths = usual.planned.plan.stages, usual.planned.plan.paths
    quotas = {m: len(paths[m]) for m, stage in enumerate(stages) if stage == 0}
    effort = effort_for(len(question.offers), question.budget)
    try:
        found = plan_paths(problem, stages, quotas, effort.budget)
        return _simulated(problem, mended(problem, found.plan, effort.mending) or found)
    except NoPlan as error:
        raise CannotPlan(
            "iterations that skip nothing find no paths on the stages of those that skip"
            f" ({error}); choose --full-every 0"
        ) from error


def _simulated(problem: Problem, planned: Planned, next_us: int = 0) -> PricedIteration:
    record: list[Stretch] = []
    Simulator(problem).run(jobs_of(problem, planned.plan), record)
    return PricedIteration(problem, planned, tuple(record), next_us)


def _put_together(
    question: Question, iterations: Sequence[PricedIteration], *, bound: bool = True
) -> Pipeline:
    usual = iterations[0]
    outcome = Simulator(usual.problem).run(usual.jobs)
    bounded = bound and effort_for(len(question.offers)).bound
    return Pipeline(
        tuple(iterations),
        _mean([(lower_bound_us(i.problem), i.times) for i in iterations]) if bounded else None,
        _estimate(question, iterations),
        bottleneck_of(usual.problem, usual.jobs, outcome, usual.record),
    )


def _mean(weighted: Sequence[tuple[int, int]]) -> int:
    return sum(value * times for value, times in weighted) // sum(times for _, times in weighted)


def _estimate(question: Question, iterations: Sequence[PricedIteration]) -> Estimate:
    """What the iterations amount to, each as often as it comes."""
    names = [offer.name for offer in question.offers]
    total_s = sum(i.planned.makespan_us * i.times for i in iterations) / US_PER_S
    rounds = sum(i.times for i in iterations)
    sent, worked_us = Counter[int](), Counter[int]()
    for iteration in iterations:
        makespan_us = iteration.planned.makespan_us
        shares = utilisation(iteration.record, len(names), makespan_us)
        for machine, share in enumerate(shares):
            worked_us[machine] += round(share * makespan_us) * iteration.times
        for job in iteration.jobs:
            # Everyone on the path sends one boundary there and one back.
            for machine in (job.origin, *job.relays):
                sent[machine] += 2 * iteration.problem.work.boundary_bytes * iteration.times
    microbatches = rounds * iterations[0].problem.microbatches
    tokens_per_s = microbatches * question.workload.tokens / total_s
    return Estimate(
        state_fits(question.offers, question.stage_state_bytes),
        total_s / rounds,
        tokens_per_s,
        {name: sent[i] / total_s * SECONDS_PER_HOUR for i, name in enumerate(names)},
        {name: worked_us[i] / US_PER_S / total_s for i, name in enumerate(names)},
        cost_per_billion_tokens(question.offers, tokens_per_s),
    )
