"""What a set of machines would do together: replicas, a full pipeline and SkipPipe side by side.

Links are queued (one boundary at a time), a backward takes two forwards, and a stage is an equal
share of the model; copies and gaps are not counted, so figures are those of a good implementation.
The number of data peers follows from how often relays are visited: with equal slots they are n / L
of n machines. The neighbours of that number are tried too, briefly.

All ways train the same microbatches, so their iterations compare; what a skipped stage costs in
learning does not show here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from protocol.errors import LocalProtocolError, LocoError

from .assignment import NoPlan
from .bottleneck import Bottleneck, bottleneck_of
from .bounds import lower_bound_us
from .plan import jobs_of
from .planner import Budget, Planned, plan
from .problem import US_PER_S, Matrix, PathRules, PipelinePeer, Problem, Work
from .replicas import (
    SECONDS_PER_HOUR,
    Estimate,
    cost_per_billion_tokens,
    diloco,
    noloco,
    state_fits,
)
from .simulator import Simulator, Stretch, utilisation
from .stage_orders import stage_orders
from .tables import Offer
from .workload import Workload

REAL_BACKWARD_PERMILLE: Final = 2000
WHOLE: Final = Budget(evaluations=600)
REAL_RULES: Final = PathRules(waves_fit=False)
"""Waves of different data peers are not in step; slots are kept to by the simulation."""
MAX_MICROBATCHES: Final = 4096
MOST_BY_DEFAULT: Final = 256
BRIEF: Final = 60
"""Evaluations by which numbers of data peers, and changes that could help, are compared."""
LEAST_HELP: Final = 0.01
"""A change that gains less is not worth a word."""


class CannotPlan(LocoError):
    """These machines cannot form this pipeline; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Question:
    """What to plan for.

    Attributes:
        microbatches: of one iteration; None takes two for every slot of the data peers.
    """

    offers: tuple[Offer, ...]
    latency_us: Matrix
    bytes_per_s: Matrix
    workload: Workload
    stages: int
    visited: int
    microbatches: int | None = None
    codec: str = "bf16"
    rules: PathRules = REAL_RULES
    budget: Budget = WHOLE


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A planned pipeline and what it would achieve."""

    problem: Problem
    planned: Planned
    lower_bound_us: int
    estimate: Estimate
    bottleneck: Bottleneck
    record: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that `loco-peer plan` tells.

    Attributes:
        estimates: by way: noloco, diloco, full, skippipe.
        help: changes that would shorten SkipPipe's iteration, and by what share, best first.
    """

    estimates: Mapping[str, Estimate]
    full: Pipeline
    skippipe: Pipeline
    help: tuple[tuple[str, float], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        chosen, ways = self.skippipe, self.estimates
        return {
            **chosen.planned.plan.to_json(chosen.problem),
            "iteration_s": {way: each.iteration_s for way, each in ways.items()},
            "lower_bound_s": chosen.lower_bound_us / US_PER_S,
            "tokens_per_s": {way: each.tokens_per_s for way, each in ways.items()},
            "cost_per_billion_tokens": {
                way: each.cost_per_billion_tokens for way, each in ways.items()
            },
            "fits": {way: each.fits for way, each in ways.items()},
            "bytes_per_hour": {way: each.bytes_per_hour for way, each in ways.items()},
            "utilisation": {way: each.utilisation for way, each in ways.items()},
            "bottleneck": chosen.bottleneck.sentence,
            "help": [{"change": change, "iteration": share} for change, share in self.help],
            "plan": chosen.planned.plan.digest(chosen.problem),
        }


def what_if(question: Question) -> Answer:
    """Plan, price and compare.

    Raises:
        CannotPlan
    """
    _check(question)
    skippipe = _pipeline(question, question.visited)
    microbatches = skippipe.problem.microbatches
    same = replace(question, microbatches=microbatches)
    full = skippipe
    if question.visited < question.stages:
        full = _pipeline(same, question.stages)
    tables = (question.offers, question.latency_us, question.bytes_per_s, question.workload)
    estimates = {
        "noloco": noloco(*tables, microbatches),
        "diloco": diloco(*tables, microbatches),
        "full": full.estimate,
        "skippipe": skippipe.estimate,
    }
    return Answer(estimates, full, skippipe, _what_helps(same, skippipe))


def _check(question: Question) -> None:
    machines, stages, layers = len(question.offers), question.stages, question.workload.num_layers
    if not 2 <= stages <= layers:
        raise CannotPlan(f"{stages} stages of {layers} layers; choose 2 to {layers} with --stages")
    if machines < stages:
        raise CannotPlan(
            f"{machines} machines cannot hold {stages} stages; add machines, or choose fewer"
            " with --stages"
        )
    if not 2 <= question.visited <= stages:
        raise CannotPlan(f"--visited must be 2 to {stages}, the stages; got {question.visited}")
    try:
        stage_orders(stages, question.visited, question.rules)
    except LocalProtocolError as error:
        raise CannotPlan(str(error)) from error
    microbatches = question.microbatches
    if microbatches is not None and not 1 <= microbatches <= MAX_MICROBATCHES:
        raise CannotPlan(f"--microbatches must be 1 to {MAX_MICROBATCHES}")


def _pipeline(question: Question, visited: int) -> Pipeline:
    problem = _best_size(question, visited)
    planned = plan(problem, question.budget)
    record: list[Stretch] = []
    jobs = jobs_of(problem, planned.plan)
    outcome = Simulator(problem).run(jobs, record)
    bound = lower_bound_us(problem)
    return Pipeline(
        problem,
        planned,
        bound,
        _estimate(question, problem, planned, record),
        bottleneck_of(problem, jobs, outcome, record),
        tuple(record),
    )


def _best_size(question: Question, visited: int) -> Problem:
    """The problem with the number of data peers that a brief search likes best."""
    found: list[tuple[int, int, Problem]] = []
    brief = replace(question.budget, evaluations=BRIEF)
    sizes = list(_numbers_of_data_peers(question, visited))
    microbatches = question.microbatches or _two_waves(question, sizes[0])
    problems = [_problem(question, visited, number, microbatches) for number in sizes]
    for problem in problems:
        try:
            found.append((plan(problem, brief).makespan_us, len(found), problem))
        except NoPlan:
            continue
    if not found:
        raise CannotPlan(
            f"no legal paths for {question.stages} stages of which {visited} are visited; change"
            " --stages or --visited"
        )
    return min(found)[2]


def _numbers_of_data_peers(question: Question, visited: int) -> Iterator[int]:
    machines = len(question.offers)
    most = machines - (question.stages - 1)
    likely = min(max(1, round(machines / visited)), most)
    for number in (likely, likely - 1, likely + 1):
        if 1 <= number <= most:
            yield number


def _two_waves(question: Question, data_peers: int) -> int:
    slots = sorted((offer.slots for offer in question.offers), reverse=True)
    return min(2 * sum(slots[:data_peers]), MOST_BY_DEFAULT)


def _problem(question: Question, visited: int, data_peers: int, microbatches: int) -> Problem:
    relays = question.stages - 1
    share, rest = divmod(len(question.offers) - data_peers, relays)
    sizes = (data_peers, *(share + (stage < rest) for stage in range(relays)))
    peers = tuple(
        PipelinePeer(offer.name, max(1, offer.compute_us // question.stages), offer.slots)
        for offer in question.offers
    )
    work = Work(
        question.workload.boundary_bytes(question.codec),
        backward_permille=REAL_BACKWARD_PERMILLE,
    )  # fmt: skip
    return Problem(
        peers,
        question.latency_us,
        question.bytes_per_s,
        work,
        sizes,
        visited,
        microbatches,
        question.rules,
        queued_links=True,
    )


def _estimate(
    question: Question, problem: Problem, planned: Planned, record: Sequence[Stretch]
) -> Estimate:
    seconds = planned.makespan_us / US_PER_S
    tokens_per_s = problem.microbatches * question.workload.tokens / seconds
    names = [offer.name for offer in question.offers]
    sent = dict.fromkeys(range(len(names)), 0)
    for origin, paths in enumerate(planned.plan.paths):
        for path in paths:
            # Everyone on the path sends one boundary there and one back.
            for machine in (origin, *path):
                sent[machine] += 2 * problem.work.boundary_bytes
    shares = utilisation(record, len(names), planned.makespan_us)
    return Estimate(
        state_fits(question.offers, question.workload.parameters // question.stages),
        seconds,
        tokens_per_s,
        {name: sent[i] / seconds * SECONDS_PER_HOUR for i, name in enumerate(names)},
        dict(zip(names, shares, strict=True)),
        cost_per_billion_tokens(question.offers, tokens_per_s),
    )


def _what_helps(question: Question, now: Pipeline) -> tuple[tuple[str, float], ...]:
    """Changes, planned anew and briefly, beside the same machines planned as briefly."""
    brief = replace(question.budget, evaluations=BRIEF)
    base = plan(now.problem, brief).makespan_us
    found: list[tuple[str, float]] = []
    for words, changed in _changes(question, now):
        try:
            gain = plan(changed, brief).makespan_us / base - 1
        except NoPlan:
            continue
        if gain <= -LEAST_HELP:
            found.append((words, gain))
    return tuple(sorted(found, key=lambda each: each[1]))


def _changes(question: Question, now: Pipeline) -> Iterator[tuple[str, Problem]]:
    problem, work = now.problem, now.problem.work
    name = problem.peers[now.bottleneck.machine].name
    yield (
        f"boundaries of half the bytes (now {question.codec})",
        replace(problem, work=replace(work, boundary_bytes=work.boundary_bytes // 2)),
    )
    yield f"twice the bandwidth to and from {name}", _faster_lines(problem, now.bottleneck.machine)
    yield f"a second machine like {name}, at its place", _doubled(problem, now)
    one = now.bottleneck.machine
    peers = list(problem.peers)
    peers[one] = replace(peers[one], forward_us=max(1, peers[one].forward_us // 2))
    yield f"a machine twice as fast in place of {name}", replace(problem, peers=tuple(peers))


def _faster_lines(problem: Problem, machine: int) -> Problem:
    rates = tuple(
        tuple(rate * (1 + (machine in (a, b))) for b, rate in enumerate(row))
        for a, row in enumerate(problem.bytes_per_s)
    )
    return replace(problem, bytes_per_s=rates)


def _doubled(problem: Problem, now: Pipeline) -> Problem:
    """One more machine on the stage of the one that holds up the others."""
    one = now.bottleneck.machine
    stage = now.planned.plan.stages[one]
    name = problem.peers[one].name
    while any(peer.name == name for peer in problem.peers):
        name += "+"
    peers = (*problem.peers, replace(problem.peers[one], name=name))
    latencies, rates = (
        tuple((*row, row[one]) for row in (*matrix, matrix[one]))
        for matrix in (problem.latency_us, problem.bytes_per_s)
    )
    fast = max(max(row) for row in problem.bytes_per_s)
    rates = tuple(tuple(rate or fast for rate in row) for row in rates)
    sizes = tuple(size + (s == stage) for s, size in enumerate(problem.stage_sizes))
    return replace(
        problem, peers=peers, latency_us=latencies, bytes_per_s=rates, stage_sizes=sizes
    )  # fmt: skip
