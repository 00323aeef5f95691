"""A pipeline that is planned and priced: its iterations, and what they amount to.

A SkipPipe whose every k-th iteration skips nothing has two kinds of iterations on one arrangement:
stages stay on their machines, the paths of the k-th are planned for themselves. Its figures are the
mean over k iterations.

Bottleneck: the data peer that is home last decides when the iteration ends. Its microbatches' time
is work, the way over links, or waiting for busy machines, links and slots. Where work and waiting
weigh more, the machine that works most is named; where the way does, the machine of its paths whose
links take most of it.

Beside pipelines stand plain replicas with the whole model. A round is H inner steps; its exchange
overlaps with the next one's training, so a round takes whichever is longer. Lines are taken to be
free of other traffic.

    noloco   each machine trains at its own pace and sends the whole vector to one partner, any of
             the others; its exchange takes the mean over partners of the slower way
    diloco   all train the same round, quotas following speeds, so its length is that of the median
             machine; every machine sends each other one 1/n of the vector as a contribution and 1/n
             as a result. The slowest line decides

Lower bounds, which no arrangement, quotas and paths can beat:

    tracks    a data peer sends at most `slots` microbatches at once, each takes at least its
              shortest closed walk (below), and only so many machines hold the data
    work      all machines together do all the work there is

No path can be shorter than the shortest walk over priced hops. Paths visit different machines,
which makes the shortest one hard to find; walks are easy: over so many hops from an origin and
back, never through it on the way, and never straight back to the machine before. Up to four hops
that is a path; longer walks may go round in a circle, and are only shorter for it. For every end of
a walk the two shortest are kept that come from different machines: where the next hop would go
straight back, the second one counts.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Final

import numpy as np

from .planner import CountEvaluations, NoPlan, Planned, hop_prices, plan, plan_paths, uncounted
from .problem import THOUSAND, US_PER_S, Problem
from .question import (
    CannotPlan,
    Effort,
    PlanQuestion,
    effort_for,
    microbatches_of,
    numbers_of_data_peers,
    problem_of,
)
from .simulator import BusyInterval, Job, Simulator, jobs_of
from .tables import MachineOffer

# --- replicas -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Estimate:
    """Figures of a way of training.

    Attributes:
        fits: whether the model's state fits in the memory of all; None if a table is silent.
        iteration_s: for as many microbatches as an iteration of the pipelines has.
        bytes_per_hour, utilisation: sent, and the share of computing, by machine.
    """

    fits: bool | None
    iteration_s: float
    tokens_per_s: float
    bytes_per_hour: dict[str, float]
    utilisation: dict[str, float]
    cost_per_billion_tokens: float


def cost_per_billion_tokens(offers: Sequence[MachineOffer], tokens_per_s: float) -> float:
    price_per_s = sum(offer.price_per_hour for offer in offers) / 3600
    return price_per_s / tokens_per_s * 1e9


def state_fits(offers: Sequence[MachineOffer], too_small: Sequence[MachineOffer]) -> bool | None:
    if too_small:
        return False
    return None if any(offer.memory_bytes is None for offer in offers) else True


def replicas_of(question: PlanQuestion) -> dict[str, Estimate]:
    """Both ways of replicas on these machines, for one microbatch each if no number is given."""
    offers, workload, number = question.offers, question.workload, len(question.offers)
    step_us = [workload.step_us(offer) for offer in offers]
    train_s = [workload.inner_steps * each_us / US_PER_S for each_us in step_us]

    def way_s(a: int, b: int, size: float, times: int = 1) -> float:
        return size / question.bytes_per_s[a][b] + times * question.latency_us[a][b] / US_PER_S

    alone, whole = [], workload.vector_bytes
    for a in range(number):
        ways = [max(way_s(a, b, whole), way_s(b, a, whole)) for b in range(number) if b != a]
        alone.append((train_s[a], max(train_s[a], fmean(ways) if ways else 0.0)))
    middle_s, share = median(train_s), 2 * whole / number
    pairs = [(a, b) for a in range(number) for b in range(number) if a != b]
    slowest_s = max((way_s(a, b, share, 2) for a, b in pairs), default=0.0)
    together = [(middle_s, max(middle_s, slowest_s))] * number
    return {
        "noloco": _of_rounds(question, alone, whole if number > 1 else 0, [1.0] * number),
        "diloco": _of_rounds(
            question, together, share * (number - 1), [middle_s / each_s for each_s in train_s]
        ),
    }


def _of_rounds(
    question: PlanQuestion,
    rounds: Sequence[tuple[float, float]],
    sent_bytes: float,
    shares: Sequence[float],
) -> Estimate:
    """The figures of rounds of (seconds of training, seconds in all) of each machine."""
    offers, workload = question.offers, question.workload
    quota = workload.inner_steps * workload.batch_microbatches * workload.tokens
    tokens_per_s = sum(
        quota * share / whole_s for (_, whole_s), share in zip(rounds, shares, strict=True)
    )
    names = [offer.name for offer in offers]
    return Estimate(
        state_fits(offers, question.too_small_for_the_whole),
        (question.microbatches or len(offers)) * workload.tokens / tokens_per_s,
        tokens_per_s,
        {n: sent_bytes / s * 3600 for n, (_, s) in zip(names, rounds, strict=True)},
        {n: train_s / s for n, (train_s, s) in zip(names, rounds, strict=True)},
        cost_per_billion_tokens(offers, tokens_per_s),
    )


# --- bounds ---------------------------------------------------------------------------------------
NEVER: Final = 1 << 60


def lower_bound_us(problem: Problem) -> int:
    peers, all_home, origins = problem.peers, problem.microbatches, problem.stage_sizes[0]
    trips = [
        trip_us + loss_us(problem, origin)
        for origin, trip_us in enumerate(round_trips(hop_prices(problem), problem.visited))
    ]

    def can_be_home(time_us: int) -> bool:
        homes = [
            sum(
                max(0, time_us - track * peer.forward_us) // trip_us
                for track in range(min(peer.slots, all_home))
            )
            for peer, trip_us in zip(peers, trips, strict=True)
        ]
        return sum(sorted(homes)[-origins:]) >= all_home

    latest = max(trips) * all_home
    return max(bisect_left(range(latest), True, key=can_be_home), _by_work_us(problem))


def round_trips(prices: Sequence[Sequence[int]], hops: int) -> list[int]:
    """The shortest closed walk of `hops` from each machine (see the top of the file)."""
    table = np.array(prices, dtype=np.int64)
    np.fill_diagonal(table, NEVER)
    ends = np.arange(len(table))
    found = []
    for origin in ends:
        shortest, second = table[origin], np.full_like(table[origin], NEVER)
        came_from = np.full_like(ends, origin)
        for _ in range(hops - 2):
            goes_back = came_from[:, None] == ends
            so_far = np.where(goes_back, second[:, None], shortest[:, None])
            longer = np.minimum(so_far + table, NEVER)
            longer[origin] = longer[:, origin] = NEVER
            came_from = longer.argmin(axis=0)
            shortest = longer[came_from, ends]
            longer[came_from, ends] = NEVER
            second = longer.min(axis=0)
        found.append(int((shortest + table[:, origin]).min()))
    return found


def loss_us(problem: Problem, origin: int) -> int:
    """The loss, and the part of the last backward that hop prices leave out."""
    work, forward_us = problem.work, problem.peers[origin].forward_us
    later = work.backward_permille * (THOUSAND - work.input_permille) // THOUSAND
    return forward_us * (work.loss_permille + later) // THOUSAND


def _by_work_us(problem: Problem) -> int:
    """The time of all work, shared by all machines, each as fast as the fastest."""
    work = problem.work
    fastest_us = min(peer.forward_us for peer in problem.peers)
    relay = THOUSAND + work.backward_permille
    permille = relay * problem.visited + work.loss_permille
    return problem.microbatches * fastest_us * permille // THOUSAND // len(problem.peers)


# --- pipelines ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class PricedIteration:
    """An iteration of one kind, as it was simulated.

    Attributes:
        next_us: what the second best of the searches ends with, where there was one.
        times: how many of this kind come in turn.
    """

    problem: Problem
    planned: Planned
    record: tuple[BusyInterval, ...]
    next_us: int = 0
    times: int = 1

    @property
    def jobs(self) -> list[Job]:
        return jobs_of(self.problem, self.planned.plan)


@dataclass(frozen=True, slots=True)
class Bottleneck:
    machine: int
    sentence: str


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
        return self.iterations[0].problem

    @property
    def planned(self) -> Planned:
        return self.iterations[0].planned


def full_pipeline(question: PlanQuestion, spent: CountEvaluations = uncounted) -> Pipeline:
    """The best that is found when nothing is skipped. Raises CannotPlan."""
    return _put_together(question, [_best(question, question.stages, spent)], bound=False)


def skipping_pipeline(question: PlanQuestion, spent: CountEvaluations = uncounted) -> Pipeline:
    """The best that is found when all iterations, or all but every k-th, skip stages.

    Raises CannotPlan.
    """
    every = question.full_every
    if every == 1:
        return _put_together(question, [_best(question, question.stages, spent)])
    usual = _best(question, question.visited, spent)
    if not every or question.visited == question.stages:
        return _put_together(question, [usual])
    unskipped = _unskipped(question, usual, spent)
    return _put_together(question, [replace(usual, times=every - 1), unskipped])


def searched(
    problem: Problem, effort: Effort, searches: int, spent: CountEvaluations = uncounted
) -> list[Planned]:
    """Plans by searches with different seeds, the best first. Raises NoPlan."""
    found = [plan(problem, effort.evaluations, seed, spent) for seed in range(searches)]
    return sorted(found, key=lambda each: each.makespan_us)


def _best(question: PlanQuestion, visited: int, spent: CountEvaluations) -> PricedIteration:
    effort = effort_for(len(question.offers), question.evaluations)
    sizes = list(numbers_of_data_peers(question, visited))[: effort.numbers]
    microbatches = microbatches_of(question, visited)
    found: list[PricedIteration] = []
    for number in sizes:
        problem = problem_of(question, visited, number, microbatches)
        try:
            ends = searched(problem, effort, effort.searches, spent)
        except NoPlan:
            continue
        found.append(_simulated(problem, ends[0], ends[min(1, len(ends) - 1)].makespan_us))
    if not found:
        raise CannotPlan(
            f"no legal paths for {question.stages} stages of which {visited} are visited; change"
            " --stages or --visited, raise pipeline.max_jump, or give the machines more slots"
        )
    return min(found, key=lambda each: each.planned.makespan_us)


def _unskipped(
    question: PlanQuestion, usual: PricedIteration, spent: CountEvaluations
) -> PricedIteration:
    """An iteration of the same machines on the same stages, with as many microbatches of each."""
    problem = replace(usual.problem, visited=question.stages)
    stages, paths = usual.planned.plan.stages, usual.planned.plan.paths
    quotas = {m: len(paths[m]) for m, stage in enumerate(stages) if stage == 0}
    effort = effort_for(len(question.offers), question.evaluations)
    try:
        found = plan_paths(problem, stages, quotas, effort.evaluations, spent=spent)
        return _simulated(problem, found)
    except NoPlan as error:
        raise CannotPlan(
            "iterations that skip nothing find no paths on the stages of those that skip"
            f" ({error}); choose --full-every 0"
        ) from error


def _simulated(problem: Problem, planned: Planned, next_us: int = 0) -> PricedIteration:
    record: list[BusyInterval] = []
    Simulator(problem).run(jobs_of(problem, planned.plan), record)
    return PricedIteration(problem, planned, tuple(record), next_us)


def _put_together(
    question: PlanQuestion, iterations: Sequence[PricedIteration], *, bound: bool = True
) -> Pipeline:
    bounded = bound and effort_for(len(question.offers)).bound
    return Pipeline(
        tuple(iterations),
        _mean([(lower_bound_us(i.problem), i.times) for i in iterations]) if bounded else None,
        _estimate(question, iterations),
        _bottleneck_of(iterations[0]),
    )


def _mean(weighted: Sequence[tuple[int, int]]) -> int:
    return sum(value * times for value, times in weighted) // sum(times for _, times in weighted)


def _estimate(question: PlanQuestion, iterations: Sequence[PricedIteration]) -> Estimate:
    names = [offer.name for offer in question.offers]
    total_s = sum(i.planned.makespan_us * i.times for i in iterations) / US_PER_S
    rounds = sum(i.times for i in iterations)
    sent, worked_us = Counter[int](), Counter[int]()
    for iteration in iterations:
        for interval in iteration.record:
            worked_us[interval.machine] += (interval.end_us - interval.start_us) * iteration.times
        for job in iteration.jobs:
            # Everyone on the path sends one boundary there and one back.
            for machine in (job.origin, *job.relays):
                sent[machine] += 2 * iteration.problem.work.boundary_bytes * iteration.times
    microbatches = rounds * iterations[0].problem.microbatches
    tokens_per_s = microbatches * question.workload.tokens / total_s
    return Estimate(
        state_fits(question.offers, question.too_small),
        total_s / rounds,
        tokens_per_s,
        {name: sent[i] / total_s * 3600 for i, name in enumerate(names)},
        {name: worked_us[i] / US_PER_S / total_s for i, name in enumerate(names)},
        cost_per_billion_tokens(question.offers, tokens_per_s),
    )


# --- what holds an iteration up -------------------------------------------------------------------
def _bottleneck_of(iteration: PricedIteration) -> Bottleneck:
    problem, jobs = iteration.problem, iteration.jobs
    names = [peer.name for peer in problem.peers]
    started: dict[int, int] = {}
    home: dict[int, int] = {}
    busy = Counter[int]()
    for interval in iteration.record:
        started.setdefault(interval.job, interval.start_us)
        home[interval.job] = interval.end_us
        busy[interval.machine] += interval.end_us - interval.start_us
    last = jobs[min(home, key=lambda job: (-home[job], job))].origin
    own = [index for index, job in enumerate(jobs) if job.origin == last]
    total = sum(home[index] - started[index] for index in own)
    work, way, ways = _shares(problem, [jobs[index] for index in own])
    waiting = total - work - way
    shares = (
        f"{names[last]} is home last; {_percent(way, total)} of its microbatches' time passes on"
        f" links, {_percent(work, total)} in work, {_percent(waiting, total)} in waiting"
    )
    if way >= work + waiting:
        far = min(ways, key=lambda m: (-ways[m], m))
        return Bottleneck(far, f"{shares}. The links of {names[far]} take most of the way")
    busiest = min(busy, key=lambda m: (-busy[m], m))
    load = _percent(busy[busiest], iteration.planned.makespan_us)
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
