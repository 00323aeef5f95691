"""The ways of choosing paths that are compared, each as a plan for the same machines.

    full              full pipelines: as many data peers as a stage has relays, one for each column
    full, all         full pipelines that all data peers feed
    blind             skipping as if all links were alike
    SkipPipe, no TC2  SkipPipe's paths, collisions not taken apart
    SkipPipe          SkipPipe's paths
    ours              protocol/pipeline's planner

Arrangements of the rivals are bred (bench/pipeline/genetic.py), several of them; each rival gets
the one that it does best with, as the simulator says. Our planner makes its own, from several
seeds. Every data peer at work sends as many microbatches as the next.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from bench.pipeline.columns import at_full_depth, full_pipelines, shared_pipelines
from bench.pipeline.conflicts import Effort, NoSchedule, conflict_search
from bench.pipeline.genetic import Breeding, Stages, arranged
from bench.pipeline.rivals import blind, skippipe
from protocol.pipeline.planner import NoPlan, plan
from protocol.pipeline.problem import Problem
from protocol.pipeline.simulator import Order, Plan, Simulator, jobs_of

FULL: Final = "full"
OURS: Final = "ours"
SEEDS: Final = range(6)
BREEDING: Final = (20, 1000)
EVALUATIONS: Final = 500


@dataclass(frozen=True, slots=True)
class Way:
    """A way, and what it plans.

    Attributes:
        problem: as this way is given it.
        predicted_us: what the simulator says that an iteration takes.
    """

    name: str
    problem: Problem
    plan: Plan
    predicted_us: int

    @property
    def share(self) -> int:
        """Microbatches of each data peer at work."""
        return max(map(len, self.plan.paths))


Chosen = Callable[[Problem, Stages], Plan]


def no_collisions_seen(problem: Problem, stages: Stages) -> Plan:
    """SkipPipe without TC2."""
    return conflict_search(problem, stages, Effort(), collisions=False)


RIVALS: Final[Mapping[str, tuple[bool, Chosen]]] = {
    FULL: (True, full_pipelines),
    "full, all": (True, shared_pipelines),
    "blind": (False, blind),
    "SkipPipe, no TC2": (False, no_collisions_seen),
    "SkipPipe": (False, skippipe),
}
"""Whether every stage is visited, and the planner, by name."""
NAMES: Final = (*RIVALS, OURS)


def predicted_us(problem: Problem, plan: Plan) -> int | None:
    """An iteration, as trainers work: gradients before activations. None: it never ends."""
    return Simulator(problem, Order.BACKWARD_FIRST).run(jobs_of(problem, plan)).makespan_us


def ways_of(problem: Problem) -> list[Way]:
    """All ways that find a plan; the full pipeline first."""
    tried = [arranged(problem, Breeding(*BREEDING, seed)) for seed in SEEDS]
    found = []
    for name, (is_full, choose) in RIVALS.items():
        posed = at_full_depth(problem) if is_full else problem
        found.append(_best(name, posed, _planned(choose, posed, tried)))
    found.append(_best(OURS, problem, _ours(problem)))
    return [way for way in found if way is not None]


def _planned(choose: Chosen, problem: Problem, tried: list[Stages]) -> Iterator[Plan]:
    for stages in tried:
        try:
            yield choose(problem, stages)
        except NoSchedule:
            continue


def _ours(problem: Problem) -> Iterator[Plan]:
    for seed in SEEDS:
        try:
            yield plan(problem, EVALUATIONS, seed).plan
        except NoPlan:
            continue


def _best(name: str, problem: Problem, plans: Iterator[Plan]) -> Way | None:
    best: Way | None = None
    for each in plans:
        shares = {len(paths) for paths in each.paths if paths}
        took_us = predicted_us(problem, each)
        if took_us is None or len(shares) > 1:
            continue
        if best is None or took_us < best.predicted_us:
            best = Way(name, problem, each, took_us)
    return best
