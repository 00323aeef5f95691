"""Small cases: every legal plan of up to five machines, against what the planner finds.

A case is drawn from a seed: three to five machines with one to three data peers, all that can be
said about them drawn too, and as many microbatches (up to four) as leave no more than MAX_PLANS
plans. All arrangements, all quotas and all paths are priced by the simulator; those that the
checker refuses do not count. Where machines hold no legal plan, the planner has to say so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, permutations, product
from math import comb
from random import Random
from typing import Final

from bench.pipeline.checker import violations
from protocol.pipeline.planner import NoPlan, plan
from protocol.pipeline.problem import (
    PathRules,
    PipelinePeer,
    Problem,
    RelayNumbers,
    Stages,
    StageWork,
    stage_orders,
)
from protocol.pipeline.simulator import Plan, Simulator, jobs_of

MAX_PLANS: Final = 4000
MAX_MACHINES: Final = 5
MAX_MICROBATCHES: Final = 4
EVALUATIONS: Final = 1000


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case.

    Attributes:
        best_us: of all plans; None if none is legal.
        ours_us: of the planner's; None if it found none.
    """

    seed: int
    plans: int
    best_us: int | None
    ours_us: int | None

    @property
    def ratio(self) -> float:
        """Ours over the best; 1 where both found nothing."""
        if self.best_us is None or self.ours_us is None:
            return 1.0 if self.best_us == self.ours_us else float("inf")
        return self.ours_us / self.best_us


def compared(seed: int) -> Outcome:
    """The planner beside all plans of one case."""
    problem = small_case(seed)
    simulator, plans, best = Simulator(problem), 0, None
    for each in every_plan(problem):
        plans += 1
        took_us = simulator.run(jobs_of(problem, each)).makespan_us
        if took_us is None or (best is not None and took_us >= best):
            continue
        if not violations(problem, each):
            best = took_us
    try:
        ours = plan(problem, EVALUATIONS).makespan_us
    except NoPlan:
        ours = None
    return Outcome(seed, plans, best, ours)


def small_case(seed: int) -> Problem:
    """A problem of a few machines, drawn."""
    random = Random(seed)
    while True:
        problem = _drawn(random)
        if number_of_plans(problem) <= MAX_PLANS:
            return problem


def _drawn(random: Random) -> Problem:
    machines = random.randint(3, MAX_MACHINES)
    num_stages = random.randint(2, min(4, machines))
    cuts = sorted(random.sample(range(1, machines), num_stages - 1))
    sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, machines], strict=True))
    numbers = range(machines)
    rules = PathRules(stage_slack=random.randint(0, 1))
    return Problem(
        peers=tuple(
            PipelinePeer(f"p{m}", random.randint(50_000, 500_000), random.randint(1, 3))
            for m in numbers
        ),
        latency_us=tuple(tuple(random.randint(1_000, 150_000) for _ in numbers) for _ in numbers),
        bytes_per_s=tuple(
            tuple(round(10 ** random.uniform(7, 8.5)) for _ in numbers) for _ in numbers
        ),
        work=StageWork(boundary_bytes=8_000_000, backward_permille=random.choice((1500, 2000))),
        stage_sizes=sizes,
        visited=random.randint(2, num_stages),
        microbatches=random.randint(1, MAX_MICROBATCHES),
        rules=rules,
        queued_links=bool(random.randint(0, 1)),
    )


def number_of_plans(problem: Problem) -> int:
    """Legal or not."""
    machines, arrangements = len(problem.peers), 1
    for size in problem.stage_sizes:
        arrangements *= comb(machines, size)
        machines -= size
    orders = stage_orders(problem.num_stages, problem.visited, problem.rules)
    paths = 0
    for order in orders:
        ways = 1
        for stage in order:
            ways *= problem.stage_sizes[stage]
        paths += ways
    number = problem.microbatches
    quotas = comb(problem.stage_sizes[0] + number - 1, number)
    return int(arrangements * quotas * paths**number)


def legal_paths(
    orders: Sequence[Stages], members: Sequence[Sequence[int]]
) -> Iterator[RelayNumbers]:
    """Every path that a data peer may use; `members` are the machines of each stage."""
    for order in orders:
        yield from product(*(members[stage] for stage in order))


def every_plan(problem: Problem) -> Iterator[Plan]:
    """All arrangements, quotas and paths."""
    labels = [s for s, size in enumerate(problem.stage_sizes) for _ in range(size)]
    orders = stage_orders(problem.num_stages, problem.visited, problem.rules)
    for stages in sorted(set(permutations(labels))):
        members = [[m for m, s in enumerate(stages) if s == k] for k in range(problem.num_stages)]
        paths = list(legal_paths(orders, members))
        for origins in combinations_with_replacement(members[0], problem.microbatches):
            for chosen in product(paths, repeat=problem.microbatches):
                by_origin: list[tuple[tuple[int, ...], ...]] = [()] * len(stages)
                for origin, path in zip(origins, chosen, strict=True):
                    by_origin[origin] = (*by_origin[origin], path)
                yield Plan(stages, tuple(by_origin))
