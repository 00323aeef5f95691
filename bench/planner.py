"""The pipeline planner beside other planners, its bounds and brute force.

Groups of rows (goals stand below them):

  published    the four schedules that SkipPipe published (20 machines at 12 places, 6 stages, 4
               visited), priced by our simulator; the bound is the published time. Goal: within 1%
  paths        our paths on the published arrangement with the published quotas. Goal: 6%
               above SkipPipe's 33.314 s at most, whose paths let stages change places
  ours         arrangement, quotas and paths, in each setting of bench/pipeline/settings.py. Goals:
               28.3 s in under 5 s of one core on the published setting; no legality broken; no
               rival that skips is faster; for 200 machines under 30 s of one core
  the rivals   of bench/pipeline/rivals.py in each setting; each may try several arrangements, and
               its best counts. "Full" ones visit every stage with as many microbatches, and so does
               our planner in the row "ours, full"
  tables       random links: ours over the rival's time, and over the bound; quartiles and median
  small cases  ours over the best of all plans (bench/pipeline/brute_force.py). Goal: 1.02 at worst

Below some of ours stands the same plan with a delay of one update, never flushed. "Processor s" is
the time of this process, an arrangement's among each rival's; "peak MB" is the process's resident
memory at its peak, of which Python with torch and numba is nearly all. `--full` adds seeds, longer
searches for the rivals' arrangements, more tables, 200 machines, and more small cases.

    python -m bench.planner [--full] [--json FILE] [--picture FILE]
"""

from pathlib import Path
from typing import Final

from bench.pipeline.arrangement_bound import arrangement_bound_us
from bench.pipeline.brute_force import Outcome, compared
from bench.pipeline.checker import violations
from bench.pipeline.comparison import Comparison, Contest, Measured, measured
from bench.pipeline.genetic import Breeding
from bench.pipeline.late import steady_us
from bench.pipeline.picture import draw
from bench.pipeline.settings import Setting, largest, random_tables, usual
from bench.pipeline.spread import Spread
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
from bench.report import Goal, Report, options
from protocol.pipeline.planner import plan_paths
from protocol.pipeline.problem import US_PER_S
from protocol.pipeline.simulator import Simulator, jobs_of

EVALUATIONS: Final = 1000
SEEDS: Final = (0,)
FULL_SEEDS: Final = (0, 1, 2)
BRIEF: Final = Contest(Breeding(20, 1000), arrangements=2, evaluations=EVALUATIONS)
LONG: Final = Contest(Breeding(20, 4000), arrangements=3, evaluations=EVALUATIONS)
HUGE: Final = Contest(Breeding(8, 300), arrangements=1, evaluations=EVALUATIONS)
"""An arrangement of 200 machines takes seconds to price."""
TABLES: Final = 5
FULL_TABLES: Final = 20
CASES: Final = 60
FULL_CASES: Final = 300
QUOTAS: Final = dict.fromkeys(PARTITIONS[0], 3 * WAVES)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the times there")
    arguments = parser.parse_args()
    full = arguments.full
    report = Report("planner", "Pipelines: planned, by us and others", {"evaluations": EVALUATIONS})
    published(report)
    paths(report, FULL_SEEDS if full else SEEDS)
    comparisons = [
        contested(report, setting, LONG if full else BRIEF, FULL_SEEDS if full else SEEDS)
        for setting in usual()
    ]
    if full:
        comparisons.append(contested(report, largest(), HUGE, SEEDS))
    tables(report, FULL_TABLES if full else TABLES)
    small_cases(report, FULL_CASES if full else CASES)
    if arguments.picture:
        draw(comparisons, arguments.picture)
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
        makespan_us = Simulator(problem).run(jobs_of(problem, each)).makespan_us or 0
        ours_s, theirs_s = makespan_us / US_PER_S, PUBLISHED_S[name]
        report.rows.append(Measured(f"published, {name}", ours_s, theirs_s).row())
        goal = Goal(f"{name}: ours over the published time", ours_s / theirs_s, 0.99, 1.01)
        report.goals.append(goal)


def paths(report: Report, seeds: tuple[int, ...]) -> None:
    problem, stages = published_problem(), published_plan(SKIPPIPE).stages
    bound_s = arrangement_bound_us(problem, stages, QUOTAS) / US_PER_S
    for seed in seeds:
        found, planned = measured(
            f"paths, seed {seed}",
            bound_s,
            lambda: plan_paths(problem, stages, QUOTAS, EVALUATIONS, seed=seed),  # noqa: B023 - called at once
        )
        report.rows.append(found.row())
        report.goals += [
            Goal("paths over SkipPipe's", found.seconds / PUBLISHED_S["skippipe"], at_most=1.06),
            Goal("paths: violations", len(violations(problem, planned.plan)), at_most=0),
        ]


def contested(
    report: Report, setting: Setting, contest: Contest, seeds: tuple[int, ...]
) -> Comparison:
    """All planners in one setting."""
    comparison = contest.held(setting, seeds)
    report.rows += [each.row() for each in comparison.rows()]
    problem = setting.problem
    late_s = (steady_us(Simulator(problem), comparison.plan) or 0) / US_PER_S
    name = f"{setting.name}: ours, one update late"
    report.rows.append(Measured(name, late_s, None).row())
    limit_s = 30 if len(problem.peers) > 100 else 5
    slowest = max(each.used_s for each in comparison.ours)
    report.goals += [
        Goal(f"{setting.name}: processor s", slowest, at_most=limit_s),
        Goal(f"{setting.name}: plans that break rules", comparison.illegal, at_most=0),
        Goal(f"{setting.name}: ours over the best rival", comparison.over_best_rival, at_most=1.0),
        Goal(f"{setting.name}: the same at full depth", comparison.over_best_full, at_most=1.0),
    ]
    if setting.name == "published":
        joint = max(each.seconds for each in comparison.ours)
        report.goals.append(Goal("published: joint, s", joint, at_most=28.3))
    return comparison


def tables(report: Report, number: int) -> None:
    """Tables drawn at random."""
    spread = Spread([BRIEF.held(setting, SEEDS) for setting in random_tables(number)])
    for name, quartiles in spread.quartiles().items():
        low, median, high = quartiles
        report.notes.append(
            f"{number} tables: ours over {name}: median {median:.3f},"
            f" quartiles {low:.3f} to {high:.3f}"
        )
    worst = max(each.over_best_rival for each in spread.comparisons)
    report.goals.append(Goal(f"{number} tables: ours over the best rival", worst, at_most=1.0))


def small_cases(report: Report, number: int) -> None:
    """Brute force."""
    outcomes: list[Outcome] = [compared(seed) for seed in range(number)]
    worst = max(outcomes, key=lambda each: each.ratio)
    exact = sum(each.ratio == 1 for each in outcomes)
    report.notes.append(
        f"{number} small cases, {sum(each.plans for each in outcomes)} plans: {exact} of ours are"
        f" the best there is, the worst (seed {worst.seed}) takes {worst.ratio:.3f} times as long"
    )
    goal = Goal("small cases: ours over the best of all plans", worst.ratio, at_most=1.02)
    report.goals.append(goal)


if __name__ == "__main__":
    main()
