"""Ways of working: what the same plan takes when machines work by other rules.

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
from dataclasses import replace
from typing import Final

from .mending import mended
from .pipelines import Iteration
from .plan import Plan, jobs_of, steady_us
from .problem import THOUSAND, US_PER_S, Problem
from .simulator import Order, Simulator

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


def by_way_of_working(iterations: Sequence[Iteration], mending: int) -> dict[str, float | None]:
    """Seconds of the mean iteration; None where paths would block each other."""
    return {way: _mean_s(iterations, price, mending) for way, price in WAYS_OF_WORKING.items()}


def _mean_s(iterations: Sequence[Iteration], price: Price, mending: int) -> float | None:
    total_us = 0
    for iteration in iterations:
        found = price(iteration.problem, iteration.planned.plan, mending)
        if found is None:
            return None
        total_us += found * iteration.times
    return total_us / sum(iteration.times for iteration in iterations) / US_PER_S
