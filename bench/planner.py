"""The pipeline planner on SkipPipe's published setting, on more machines, and beside its bounds.

Rows:

  published   the four schedules that SkipPipe published (20 machines at 12 places, 6 stages, 4
              visited), priced by our simulator; the bound is the published time
  paths       our paths on the published arrangement with the published quotas
  joint       our arrangement, quotas and paths for the same machines and microbatches
  42, 200     as many machines at the same places, 8 stages, 6 visited

Below each of ours stands the same plan with a delay of one update, never flushed. "Processor s" is
the time of this process. `--full` adds three seeds and 200 machines.

    python -m bench.planner [--full] [--json FILE]
"""

import time
from collections.abc import Callable
from typing import Final

from bench.planner_settings import (
    BLIND,
    NO_COLLISIONS,
    PARTITIONS,
    PUBLISHED_S,
    SKIPPIPE,
    WAVES,
    published_pipelines,
    published_plan,
    published_problem,
)
from bench.report import Goal, Report, Row, options
from protocol.pipeline.bounds import arrangement_bound_us, lower_bound_us
from protocol.pipeline.checker import violations
from protocol.pipeline.plan import jobs_of, steady_us
from protocol.pipeline.planner import Budget, Planned, plan, plan_paths
from protocol.pipeline.problem import US_PER_S, Problem
from protocol.pipeline.regions import REGIONS
from protocol.pipeline.simulator import Simulator

EVALUATIONS: Final = 1000
FULL_SEEDS: Final = 3
MANY: Final = {42: (7, *[5] * 7), 200: (32, *[24] * 7)}
QUOTAS: Final = dict.fromkeys(PARTITIONS[0], 3 * WAVES)


def main() -> None:
    arguments = options(__doc__).parse_args()
    report = Report(
        "planner", "Pipelines: published schedules, and ours", {"evaluations": EVALUATIONS}
    )
    published(report)
    problem = published_problem()
    stages = published_plan(SKIPPIPE).stages
    bound_s = arrangement_bound_us(problem, stages, QUOTAS) / US_PER_S
    for seed in range(FULL_SEEDS if arguments.full else 1):
        budget = Budget(EVALUATIONS, seed=seed)
        paths = measured(
            report, f"paths, seed {seed}", problem, bound_s,
            lambda: plan_paths(problem, stages, QUOTAS, budget),  # noqa: B023 - called at once
        )  # fmt: skip
        report.goals.append(Goal("paths as good as SkipPipe's, s", paths, at_most=33.314))
        joint = measured(
            report, f"joint, seed {seed}", problem, lower_bound_us(problem) / US_PER_S,
            lambda: plan(problem, budget),  # noqa: B023 - called at once
        )  # fmt: skip
        report.goals.append(Goal("joint quotas, s", joint, at_most=28.3))
    for number in MANY if arguments.full else (42,):
        many(report, number)
    report.publish(arguments.json)


def published(report: Report) -> None:
    plans = {
        "full": (published_pipelines(), 6),
        "blind": (published_plan(BLIND), 4),
        "no_collisions": (published_plan(NO_COLLISIONS), 4),
        "skippipe": (published_plan(SKIPPIPE), 4),
    }
    for name, (each, visited) in plans.items():
        problem = published_problem(visited)
        start_s = time.process_time()
        makespan_us = Simulator(problem).run(jobs_of(problem, each)).makespan_us or 0
        used_s = time.process_time() - start_s
        ours_s, theirs_s = makespan_us / US_PER_S, PUBLISHED_S[name]
        report.rows.append(row(f"published, {name}", ours_s, theirs_s, 1, used_s))
        goal = Goal(f"{name}: ours over the published time", ours_s / theirs_s, 0.99, 1.01)
        report.goals.append(goal)


def measured(
    report: Report, name: str, problem: Problem, bound_s: float, search: Callable[[], Planned]
) -> float:
    start_s = time.process_time()
    planned = search()
    used_s = time.process_time() - start_s
    seconds = planned.makespan_us / US_PER_S
    report.rows.append(row(name, seconds, bound_s, planned.evaluations, used_s))
    late_s = (steady_us(Simulator(problem), planned.plan) or 0) / US_PER_S
    report.rows.append(row(f"{name}, one update late", late_s, None, 0, 0.0))
    report.goals.append(
        Goal(f"{name}: processor s", used_s, at_most=30 if problem.num_stages > 6 else 5)
    )
    report.goals.append(
        Goal(f"{name}: violations", len(violations(problem, planned.plan)), at_most=0)
    )
    return seconds


def many(report: Report, number: int) -> None:
    places = [REGIONS[i % len(REGIONS)] for i in range(number)]
    sizes = MANY[number]
    problem = published_problem(6, places, sizes, 6 * sizes[0])
    bound_s = lower_bound_us(problem) / US_PER_S
    measured(
        report, f"{number} machines", problem, bound_s, lambda: plan(problem, Budget(EVALUATIONS))
    )


def row(name: str, seconds: float, bound_s: float | None, evaluations: int, used_s: float) -> Row:
    return {
        "setting": name,
        "iteration s": seconds,
        "bound s": bound_s,
        "evaluations": evaluations,
        "processor s": used_s,
    }


if __name__ == "__main__":
    main()
