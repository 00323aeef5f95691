"""An iteration of a pipeline that is never flushed: gradients are applied one update late.

No daemon trains so (docs/decisions/0026-no-delayed-updates.md); studies compare with it.
"""

from typing import Final

from protocol.pipeline.simulator import Plan, Simulator, jobs_of

SETTLING: Final = 3
AVERAGED: Final = 6
"""Iterations that are run before, and for, the mean."""


def steady_us(simulator: Simulator, plan: Plan) -> int | None:
    """The mean of some iterations after the first few; None where the paths block each other."""
    few, more = (
        simulator.run(jobs_of(simulator.problem, _repeated(plan, times))).makespan_us
        for times in (SETTLING, SETTLING + AVERAGED)
    )
    return None if few is None or more is None else (more - few) // AVERAGED


def _repeated(plan: Plan, times: int) -> Plan:
    """Each iteration begun before the last has ended: its microbatches stand behind the last's."""
    return Plan(plan.stages, tuple(paths * times for paths in plan.paths))
