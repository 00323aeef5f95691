"""A set of machines as replicas, as a full pipeline and with SkipPipe, side by side.

All ways train the same microbatches, so their iterations compare; what a skipped stage costs in
learning does not show here.

The first answer is how long, for what money, which way: replicas where every machine holds the
whole model, else a pipeline that skips nothing, because skipping costs learning that no table
shows. A run ends when a machine of middling speed has done its steps, and all train meanwhile: N
machines train N times the tokens of one.

Ways of working are other rules for the same arrangement; paths are mended for each:

    arrival    what arrived first is done first; an iteration ends before the next one begins. Plans
               are made for this way
    1f1b       backwards and losses before forwards
    two_parts  a backward hands the gradient of its input on, and leaves that of the weights for
               when there is time
    both       the two together, as trainers of stages work

Help: single changes of machines and links, and what each does to an iteration. The present plan,
mended for the change, is compared with the present plan, mended as much: both begin alike, so
chance in the search does not come in. One more machine asks for other groups. It is tried on every
stage and at every place where a machine stands, as a twin of the fastest one there, briefly at
first; then each stage's best place is planned anew by a few searches.

Noise: a gain by mending counts above LEAST_HELP: changes of one percent, which nobody would pay
for, seemed to gain up to 2.8%. A gain by searches counts above what the two best searches for the
present plan differ by, if that is more.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple

from .pipelines import (
    NEVER,
    Estimate,
    Pipeline,
    PricedIteration,
    full_pipeline,
    replicas_of,
    searched,
    skipping_pipeline,
)
from .planner import CountEvaluations, NoPlan, mended, uncounted
from .problem import THOUSAND, US_PER_S, Problem
from .question import BOUNDARY_CODECS, Effort, PlanQuestion, check, effort_for
from .simulator import Order, Plan, Simulator, jobs_of

# --- changes --------------------------------------------------------------------------------------
LEAST_HELP: Final = 0.03
ORDINALS: Final = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


class Gain(NamedTuple):
    """A change and what it does to an iteration: -0.18 takes 18% off it."""

    change: str
    share: float


@dataclass(frozen=True, slots=True)
class Help:
    """The changes worth telling, best first, and what counts as noise."""

    gains: tuple[Gain, ...]
    noise: float


class _Change(NamedTuple):
    """A change; its plan is the present one, with room for what the change adds."""

    words: str
    problem: Problem
    plan: Plan


def what_helps(question: PlanQuestion, now: Pipeline, spent: CountEvaluations = uncounted) -> Help:
    effort = effort_for(len(question.offers), question.evaluations)
    unchanged = _Change("nothing", now.problem, now.planned.plan)
    base = _mended_us(unchanged, effort.judging, spent)
    noise = max(LEAST_HELP, now.iterations[0].next_us / base - 1)
    ends = [(c.words, _mended_us(c, effort.judging, spent)) for c in _changes(question, now)]
    for change in _best_places(question, now, effort, spent):
        end = _mended_us(change, effort.judging, spent)
        anew = _anew_us(change.problem, effort, spent)
        ends.append((change.words, min(end, anew) if anew < base * (1 - noise) else end))
    gains = [Gain(words, end / base - 1) for words, end in ends]
    told = [gain for gain in gains if gain.share < -LEAST_HELP]
    return Help(tuple(sorted(told, key=lambda gain: gain.share)), noise)


def _best_places(
    question: PlanQuestion, now: Pipeline, effort: Effort, spent: CountEvaluations
) -> list[_Change]:
    """One more machine on each stage, at the place that a brief mending likes best."""
    best: dict[int, tuple[int, _Change]] = {}
    for stage, model in _places(question, now)[: effort.places]:
        change = _one_more(question, now, stage, model)
        end = _mended_us(change, effort.brief, spent)
        if end < best.get(stage, (NEVER,))[0]:
            best[stage] = end, change
    return [change for _, change in best.values()]


def _mended_us(change: _Change, evaluations: int, spent: CountEvaluations) -> int:
    found = mended(change.problem, change.plan, evaluations, spent=spent)
    return found.makespan_us if found else NEVER


def _anew_us(problem: Problem, effort: Effort, spent: CountEvaluations) -> int:
    if not effort.planned_anew:
        return NEVER
    try:
        return searched(problem, effort, effort.planned_anew, spent)[0].makespan_us
    except NoPlan:
        return NEVER


def _changes(question: PlanQuestion, now: Pipeline) -> Iterator[_Change]:
    problem, plan, one = now.problem, now.planned.plan, now.bottleneck.machine
    work, name = problem.work, problem.peers[one].name
    for coarser in BOUNDARY_CODECS[BOUNDARY_CODECS.index(question.codec) + 1 :][:1]:
        size = question.workload.boundary_bytes(coarser)
        fewer = replace(problem, work=replace(work, boundary_bytes=size))
        yield _Change(f"boundaries in {coarser}, half the bytes of {question.codec}", fewer, plan)
    wider = _faster_lines(problem, one)
    yield _Change(f"twice the bandwidth to and from {name}", wider, plan)
    peers = list(problem.peers)
    peers[one] = replace(peers[one], forward_us=max(1, peers[one].forward_us // 2))
    faster = replace(problem, peers=tuple(peers))
    yield _Change(f"a machine twice as fast in place of {name}", faster, plan)


def _faster_lines(problem: Problem, machine: int) -> Problem:
    rates = tuple(
        tuple(rate * (1 + (machine in (a, b))) for b, rate in enumerate(row))
        for a, row in enumerate(problem.bytes_per_s)
    )
    return replace(problem, bytes_per_s=rates)


def _places(question: PlanQuestion, now: Pipeline) -> list[tuple[int, int]]:
    """Stages, and machines to add a twin of: busy stages and central places first."""
    problem = now.problem
    fastest: dict[str, int] = {}
    for machine, offer in enumerate(question.offers):
        known = fastest.setdefault(offer.location, machine)
        if offer.compute_us < question.offers[known].compute_us:
            fastest[offer.location] = machine
    central = sorted(fastest.values(), key=lambda machine: (_far_us(problem, machine), machine))
    stages = _busiest_stages(now)
    ranked = sorted((s + p, s, p) for s in range(len(stages)) for p in range(len(central)))
    return [(stages[s], central[p]) for _, s, p in ranked]


def _far_us(problem: Problem, machine: int) -> int:
    others = (other for other in range(len(problem.peers)) if other != machine)
    return sum(problem.travel_us(machine, other) for other in others)


def _busiest_stages(now: Pipeline) -> list[int]:
    worked: defaultdict[int, int] = defaultdict(int)
    for interval in now.iterations[0].record:
        worked[now.planned.plan.stages[interval.machine]] += interval.end_us - interval.start_us
    sizes = now.problem.stage_sizes
    return sorted(range(len(sizes)), key=lambda stage: (-worked[stage] / sizes[stage], stage))


def _one_more(question: PlanQuestion, now: Pipeline, stage: int, model: int) -> _Change:
    problem, plan, offer = now.problem, now.planned.plan, question.offers[model]
    what = f"relay for stage {stage}" if stage else "machine for the data (stage 0)"
    words = f"{_ordinal(problem.stage_sizes[stage])} {what}, in {offer.location} like {offer.name}"
    longer = Plan((*plan.stages, stage), (*plan.paths, ()))
    return _Change(words, _with_twin(problem, model, stage), longer)


def _ordinal(there: int) -> str:
    return f"a {ORDINALS[there - 1]}" if there <= len(ORDINALS) else "one more"


def _with_twin(problem: Problem, model: int, stage: int) -> Problem:
    taken: Sequence[str] = [peer.name for peer in problem.peers]
    name = problem.peers[model].name
    while name in taken:
        name += "+"
    peers = (*problem.peers, replace(problem.peers[model], name=name))
    latencies, rates = (
        tuple((*row, row[model]) for row in (*matrix, matrix[model]))
        for matrix in (problem.latency_us, problem.bytes_per_s)
    )
    return replace(
        problem,
        peers=peers,
        latency_us=latencies,
        bytes_per_s=rates,
        stage_sizes=tuple(size + (s == stage) for s, size in enumerate(problem.stage_sizes)),
    )


# --- the first answer -----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RunEstimate:
    """A run on these machines, by one way (noloco, diloco, full or skippipe).

    Attributes:
        cost: in the currency of the table's prices.
    """

    way: str
    hours: float
    cost: float
    tokens: int
    tokens_per_s: float


def verdict_of(
    question: PlanQuestion, way: str, estimate: Estimate, tokens_per_peer: int, data_peers: int
) -> RunEstimate:
    tokens = tokens_per_peer * data_peers
    hours = tokens / estimate.tokens_per_s / 3600
    price = sum(offer.price_per_hour for offer in question.offers)
    return RunEstimate(way, hours, hours * price, tokens, estimate.tokens_per_s)


# --- ways of working ------------------------------------------------------------------------------
WAYS_OF_WORKING: Final = {
    "arrival": (Order.ARRIVAL, THOUSAND),
    "1f1b": (Order.BACKWARD_FIRST, THOUSAND),
    "two_parts": (Order.ARRIVAL, THOUSAND // 2),
    "both": (Order.BACKWARD_FIRST, THOUSAND // 2),
}
"""The order of work, and the permille of a backward that is the gradient of the input: half,
because it has as many multiplications as the weights'."""


def by_way_of_working(
    iterations: Sequence[PricedIteration], mending: int, spent: CountEvaluations = uncounted
) -> dict[str, float | None]:
    """Seconds of the mean iteration; None where paths would block each other."""
    found: dict[str, float | None] = {}
    for way in WAYS_OF_WORKING:
        times = [(_us(iteration, way, mending, spent), iteration.times) for iteration in iterations]
        known = [us * count for us, count in times if us is not None]
        rounds = sum(count for _, count in times)
        found[way] = sum(known) / rounds / US_PER_S if len(known) == len(times) else None
    return found


def _us(iteration: PricedIteration, way: str, mending: int, spent: CountEvaluations) -> int | None:
    problem, plan = iteration.problem, iteration.planned.plan
    if way == "arrival":
        return Simulator(problem).run(jobs_of(problem, plan)).makespan_us
    order, input_permille = WAYS_OF_WORKING[way]
    changed = replace(problem, work=replace(problem.work, input_permille=input_permille))
    found = mended(changed, plan, mending, order, spent)
    return None if found is None else found.makespan_us


# --- all of it ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """Everything that `loco-peer plan` tells.

    Attributes:
        estimates: by way: noloco, diloco, full, skippipe.
        ways_of_working: seconds of an iteration of full and skippipe, by way of working.
        help: changes that would shorten SkipPipe's iteration.
    """

    estimates: Mapping[str, Estimate]
    full: Pipeline
    skippipe: Pipeline
    ways_of_working: Mapping[str, Mapping[str, float | None]]
    help: Help

    def to_json(self) -> dict[str, Any]:
        chosen, ways = self.skippipe, self.estimates
        bound_us = chosen.lower_bound_us
        return {
            **chosen.planned.plan.to_json(chosen.problem),
            **{
                field.name: {way: getattr(each, field.name) for way, each in ways.items()}
                for field in fields(Estimate)
            },
            "lower_bound_s": None if bound_us is None else bound_us / US_PER_S,
            "unskipped": self._unskipped(),
            "ways_of_working": {way: dict(each) for way, each in self.ways_of_working.items()},
            "bottleneck": chosen.bottleneck.sentence,
            "help": [{"change": each.change, "iteration": each.share} for each in self.help.gains],
            "help_noise": self.help.noise,
            "plan": chosen.planned.plan.digest(chosen.problem),
        }

    def _unskipped(self) -> dict[str, Any] | None:
        """The iterations of SkipPipe that skip nothing; None where none do."""
        if len(self.skippipe.iterations) == 1:
            return None
        usual, whole = self.skippipe.iterations
        plan = whole.planned.plan
        return {
            "every": usual.times + whole.times,
            "iteration_s": whole.planned.makespan_us / US_PER_S,
            "paths": plan.to_json(whole.problem)["paths"],
            "plan": plan.digest(whole.problem),
        }


def most_evaluations(question: PlanQuestion) -> int:
    """How many iterations `what_if` simulates at most, about: mending often ends early."""
    effort = effort_for(len(question.offers), question.evaluations)
    pipelines = 2 if question.visited < question.stages else 1
    helping = effort.judging + effort.planned_anew * effort.evaluations
    mended_ways = 2 * (len(WAYS_OF_WORKING) - 1)
    changes = 4 + mended_ways  # nothing and three others, then a place for each stage
    return (
        pipelines * effort.simulated
        + changes * effort.judging
        + effort.places * effort.brief
        + min(effort.places, question.stages) * helping
    )


def what_if(question: PlanQuestion, spent: CountEvaluations = uncounted) -> WhatIfAnswer:
    """Plan, price and compare. Raises CannotPlan."""
    check(question)
    skippipe = skipping_pipeline(question, spent)
    same = replace(question, microbatches=skippipe.problem.microbatches)
    skips = skippipe.problem.visited < question.stages
    full = full_pipeline(same, spent) if skips else skippipe
    estimates = {**replicas_of(same), "full": full.estimate, "skippipe": skippipe.estimate}
    judging = effort_for(len(question.offers), question.evaluations).judging
    working = {
        "full": by_way_of_working(full.iterations, judging, spent),
        "skippipe": by_way_of_working(skippipe.iterations, judging, spent),
    }
    helps = what_helps(same, skippipe, spent)
    return WhatIfAnswer(estimates, full, skippipe, working, helps)
