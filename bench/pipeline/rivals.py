"""The rivals, by name: each makes a plan for a problem.

All of them get the same arrangement of machines, but ours, which makes its own. Rivals without
skipping plan for the same machines and microbatches at full depth; where paths skip, each
microbatch trains fewer layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from bench.pipeline.columns import at_full_depth, full_pipelines, shared_pipelines
from bench.pipeline.conflicts import Effort, NoSchedule, conflict_search
from bench.pipeline.genetic import Stages
from bench.pipeline.wiring import agora, swarm
from protocol.pipeline.problem import Problem
from protocol.pipeline.simulator import Plan, Simulator, jobs_of

FINE_MACHINES: Final = 20
"""Up to so many, SkipPipe's search is also run with an agent for each slot."""
BLIND_US: Final = 1000
NEVER_US: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class Rival:
    """Another planner.

    Attributes:
        full_depth: whether it visits every stage.
        plan: may raise NoSchedule.
    """

    name: str
    full_depth: bool
    plan: Callable[[Problem, Stages], Plan]

    def posed(self, problem: Problem) -> Problem:
        """The problem as this rival is given it."""
        return at_full_depth(problem) if self.full_depth else problem


def skippipe(problem: Problem, stages: Stages) -> Plan:
    """Conflict-based search, slots merged and apart; the better one."""
    efforts = [Effort()]
    if len(stages) <= FINE_MACHINES:
        efforts.append(Effort(merged=1, nodes=150))
    found: list[tuple[int, int, Plan]] = []
    for number, effort in enumerate(efforts):
        try:
            plan = conflict_search(problem, stages, effort)
        except NoSchedule as error:
            refusal = error
        else:
            found.append((priced_us(problem, plan), number, plan))
    if not found:
        raise refusal
    return min(found)[2]


def blind(problem: Problem, stages: Stages) -> Plan:
    """The same search as if all links were alike: nearly equal draws decide."""
    random, numbers = Random(problem.digest()), range(len(stages))
    draws = tuple(tuple(random.randint(1, BLIND_US) for _ in numbers) for _ in numbers)
    alike = tuple((1 << 40,) * len(stages) for _ in numbers)
    unseen = replace(problem, latency_us=draws, bytes_per_s=alike)
    return conflict_search(unseen, stages, Effort(), collisions=False, judge=problem)


def priced_us(problem: Problem, plan: Plan) -> int:
    """What the simulator says; very much where paths block each other."""
    return Simulator(problem).run(jobs_of(problem, plan)).makespan_us or NEVER_US


RIVALS: Final = (
    Rival("SkipPipe", full_depth=False, plan=skippipe),
    Rival("latency-blind skipping", full_depth=False, plan=blind),
    Rival("SWARM, skipping", full_depth=False, plan=swarm),
    Rival("Agora, skipping", full_depth=False, plan=agora),
    Rival("full pipelines", full_depth=True, plan=full_pipelines),
    Rival("full, all data peers", full_depth=True, plan=shared_pipelines),
    Rival("SWARM, full", full_depth=True, plan=swarm),
    Rival("Agora, full", full_depth=True, plan=agora),
)
