"""How long an iteration takes: the planner's plans for SkipPipe's 20 machines, simulated.

The machines, links and prices are those of the published setting (bench/planner_settings.py): 30
microbatches, a boundary of 33.6 MB in bf16. The study's model is far smaller; only the ratios of
these times count, where a full pipeline is compared with a skipping one for the same time.

    full          six stages, all visited
    skip          four of six visited
    small         the machines on four stages, five each, all visited
    late          the plan of `skip`, never flushed
    int8          boundaries of half the bytes
"""

from dataclasses import replace
from functools import cache
from typing import Final

from bench.pipeline.columns import at_full_depth
from bench.pipeline.late import steady_us
from bench.planner_settings import WORK, published_problem
from protocol.pipeline.planner import plan
from protocol.pipeline.problem import US_PER_S
from protocol.pipeline.simulator import Simulator
from protocol.run.ways import CODECS

from .arms import ARMS, StageArm

EVALUATIONS: Final = 3000
_SIZES: Final = {6: (5, 3, 3, 3, 3, 3), 4: (5, 5, 5, 5)}


def iteration_s(arm: StageArm) -> float | None:
    """Seconds of an iteration; None of an arm that breaks what plans keep, or has columns."""
    if arm.columns > 1 or arm.routes in ("skip-first", "unequal", "any-order"):
        return None
    usual_s = _planned_s(arm.stages, arm.visited, arm.codec, arm.late > 0)
    if not arm.full_every:
        return usual_s
    full_s = _planned_s(arm.stages, arm.stages, arm.codec, arm.late > 0)
    return usual_s + (full_s - usual_s) / arm.full_every


def steps_of(arm: StageArm, steps: int) -> int:
    """Steps of an arm where the setting has so many."""
    if arm.clock_of is None:
        return steps
    theirs_s, ours_s = iteration_s(ARMS[arm.clock_of]), iteration_s(arm)
    assert theirs_s is not None, f"{arm.clock_of} has no clock"
    assert ours_s is not None, f"{arm.name} has no clock"
    return round(steps * theirs_s / ours_s)


@cache
def _planned_s(stages: int, visited: int, codec: str, late: bool) -> float:
    codes = CODECS[codec].bytes_per_value / CODECS["bf16"].bytes_per_value
    work = replace(WORK, boundary_bytes=round(WORK.boundary_bytes * codes))
    problem = replace(published_problem(visited, sizes=_SIZES[stages]), work=work)
    if visited == stages:
        problem = at_full_depth(problem)
    planned = plan(problem, EVALUATIONS)
    found_us = steady_us(Simulator(problem), planned.plan) if late else planned.makespan_us
    assert found_us is not None, "a plan that blocks itself"
    return found_us / US_PER_S
