"""What a set of machines would do together: replicas, a full pipeline and SkipPipe side by side.

All ways train the same microbatches, so their iterations compare; what a skipped stage costs in
learning does not show here.

The first answer is what people ask of machines on offer: how long, for what money, which way.
Replicas are the way where every machine holds the whole model; a pipeline where one does not, and
then one that skips nothing, for skipping costs learning that no table shows. A run ends when a
machine of middling speed has done its steps, and all train meanwhile: N machines train N times the
tokens of one.

Ways of working: what the same plan takes when machines work by other rules.

    arrival    what arrived first is done first; an iteration ends before the next one begins. Plans
               are made for this way
    1f1b       backwards and losses before forwards
    two_parts  a backward hands the gradient of its input on, and leaves that of the weights for
               when there is time
    both       the two together
    async      gradients are applied one update late, so the next iteration begins before this one
               has ended

Stages stay where the plan has them, and paths are mended for the rules of each way (mending.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from .changes import Help, what_helps
from .effort import effort_for
from .mending import mended
from .pipelines import Pipeline, PricedIteration, full_pipeline, skipping_pipeline
from .plan import Plan, jobs_of, steady_us
from .problem import THOUSAND, US_PER_S, Problem
from .question import Question, check
from .replicas import SECONDS_PER_HOUR, Estimate, diloco, noloco, state_fits
from .simulator import Order, Simulator
from .tables import MachineOffer


# --- the first answer -----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RunEstimate:
    """A run on these machines, by one way.

    Attributes:
        way: noloco, diloco, full or skippipe.
        tokens: of all peers with data together.
        cost: of all machines, in the currency of the table's prices.
    """

    way: str
    tokens: int
    tokens_per_s: float
    hours: float
    cost: float


def needs_pipeline(question: Question) -> bool:
    """Whether a machine is known to be too small for the whole model."""
    return state_fits(question.offers, question.workload.state_bytes) is False


def too_small_for_the_whole(question: Question) -> tuple[MachineOffer, ...]:
    """Machines that are known to lack the memory for the whole model's state."""
    needed = question.workload.state_bytes
    return tuple(o for o in question.offers if o.memory_bytes and o.memory_bytes < needed)


def replicas_of(question: Question) -> Mapping[str, Estimate]:
    """What these machines would do as replicas, for one microbatch each if none are asked for."""
    tables = (question.offers, question.latency_us, question.bytes_per_s, question.workload)
    number = question.microbatches or len(question.offers)
    return {"noloco": noloco(*tables, number), "diloco": diloco(*tables, number)}


def verdict_of(
    question: Question, way: str, estimate: Estimate, tokens_per_peer: int, data_peers: int
) -> RunEstimate:
    """How long the run takes this way, and what it costs."""
    tokens = tokens_per_peer * data_peers
    hours = tokens / estimate.tokens_per_s / SECONDS_PER_HOUR
    price = sum(offer.price_per_hour for offer in question.offers)
    return RunEstimate(way, tokens, estimate.tokens_per_s, hours, hours * price)


# --- ways of working ------------------------------------------------------------------------------
INPUT_PERMILLE: Final = THOUSAND // 2
"""Half of a backward is the gradient of the input: as many multiplications as the weights'."""
TOGETHER: Final = 4
"""Iterations for which the paths of a pipeline that is never flushed are mended."""
Price = Callable[[Problem, Plan, int], int | None]
"""Microseconds of an iteration, after mending with so many evaluations."""


def _as_planned(problem: Problem, plan: Plan, _mending: int) -> int | None:
    return Simulator(problem).run(jobs_of(problem, plan)).makespan_us


def _mended(order: Order, input_permille: int = THOUSAND) -> Price:
    def price(problem: Problem, plan: Plan, mending: int) -> int | None:
        changed = replace(problem, work=replace(problem.work, input_permille=input_permille))
        found = mended(changed, plan, mending, order)
        return None if found is None else found.makespan_us

    return price


def _never_flushed(problem: Problem, plan: Plan, mending: int) -> int | None:
    found = mended(problem, plan, mending // TOGETHER, iterations=TOGETHER)
    return None if found is None else steady_us(Simulator(problem), found.plan)


WAYS_OF_WORKING: Final[Mapping[str, Price]] = {
    "arrival": _as_planned,
    "1f1b": _mended(Order.BACKWARD_FIRST),
    "two_parts": _mended(Order.ARRIVAL, INPUT_PERMILLE),
    "both": _mended(Order.BACKWARD_FIRST, INPUT_PERMILLE),
    "async": _never_flushed,
}


def by_way_of_working(
    iterations: Sequence[PricedIteration], mending: int
) -> dict[str, float | None]:
    """Seconds of the mean iteration; None where paths would block each other."""
    return {way: _mean_s(iterations, price, mending) for way, price in WAYS_OF_WORKING.items()}


def _mean_s(iterations: Sequence[PricedIteration], price: Price, mending: int) -> float | None:
    total_us = 0
    for iteration in iterations:
        found = price(iteration.problem, iteration.planned.plan, mending)
        if found is None:
            return None
        total_us += found * iteration.times
    return total_us / sum(iteration.times for iteration in iterations) / US_PER_S


# --- all of it ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Answer:
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
        """Plain values."""
        chosen, ways = self.skippipe, self.estimates
        bound_us = chosen.lower_bound_us
        return {
            **chosen.planned.plan.to_json(chosen.problem),
            "iteration_s": {way: each.iteration_s for way, each in ways.items()},
            "lower_bound_s": None if bound_us is None else bound_us / US_PER_S,
            "tokens_per_s": {way: each.tokens_per_s for way, each in ways.items()},
            "cost_per_billion_tokens": {
                way: each.cost_per_billion_tokens for way, each in ways.items()
            },
            "fits": {way: each.fits for way, each in ways.items()},
            "bytes_per_hour": {way: each.bytes_per_hour for way, each in ways.items()},
            "utilisation": {way: each.utilisation for way, each in ways.items()},
            "unskipped": self._unskipped(),
            "ways_of_working": {way: dict(each) for way, each in self.ways_of_working.items()},
            "bottleneck": chosen.bottleneck.sentence,
            "help": [{"change": each.change, "iteration": each.share} for each in self.help.gains],
            "help_noise": self.help.noise,
            "plan": chosen.planned.plan.digest(chosen.problem),
        }

    def _unskipped(self) -> dict[str, Any] | None:
        """The iterations of SkipPipe that skip nothing; None where there are no such."""
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


def what_if(question: Question) -> Answer:
    """Plan, price and compare.

    Raises:
        CannotPlan
    """
    check(question)
    skippipe = skipping_pipeline(question)
    same = replace(question, microbatches=skippipe.problem.microbatches)
    skips = skippipe.problem.visited < question.stages
    full = full_pipeline(same) if skips else skippipe
    estimates = {**replicas_of(same), "full": full.estimate, "skippipe": skippipe.estimate}
    judging = effort_for(len(question.offers), question.budget).judging
    working = {
        "full": by_way_of_working(full.iterations, judging),
        "skippipe": by_way_of_working(skippipe.iterations, judging),
    }
    return Answer(estimates, full, skippipe, working, what_helps(same, skippipe))
