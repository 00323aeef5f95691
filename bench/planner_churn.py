"""Pipelines whose links and machines change: re-planned with few moves, planned anew, or left.

In virtual time, seeded; SkipPipe's 20 machines at 12 places, 6 stages of which 4 are visited; with
`--full` 42 machines, 8 stages, 6 visited. No waves (slots are kept at every moment). A stage's
state is 4 GB. A new plan is expected to live 100 iterations, and 30 under churn. Rows:

  noise N%    every link's rate, drawn once within N% of the table's
  churn N%    so many machines of a hundred go in an hour, each for an hour on the average, and come
              back without state. Hours of this are played

Policies:

  anew        planned from nothing at every change; moves are counted, not charged: the ideal
  re-planned  `replan`, which knows the plan for all machines: moves are charged as state_moves.py
              prices them
  left        never planned again: the work of a machine that is gone goes to replicas of its stage,
              and comes back with it. Where a stage has nobody, training stands

"lost s/h" is training time lost in an hour, against the ideal: (iterations missing) * (its mean
iteration). "moves" are stages taken on by machines, newcomers among them; with churn, moves and the
seconds charged for them are those of an hour, processor seconds those of one plan. The last lines
are a relay lost in the middle of an iteration, by what is done about it (loss.py).

    python -m bench.planner_churn [--full] [--json FILE]
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Final

from bench.planner_settings import published_problem
from bench.report import Goal, Report, Row, options
from protocol.pipeline.assignment import NoPlan, hop_prices
from protocol.pipeline.checker import violations
from protocol.pipeline.draft import Draft
from protocol.pipeline.loss import Loss, Policy, lose
from protocol.pipeline.plan import Plan, jobs_of
from protocol.pipeline.planner import Budget, plan
from protocol.pipeline.problem import US_PER_S, PathRules, Problem
from protocol.pipeline.regions import REGIONS
from protocol.pipeline.replan import BRIEF, carried_over, replan
from protocol.pipeline.simulator import Simulator
from protocol.pipeline.state_moves import MoveTerms
from protocol.pipeline.takeover import Takeover

STATE_BYTES: Final = 4 * 10**9
HORIZON: Final = 100
CHURN_HORIZON: Final = 30
"""About a quarter of an hour; changes are as far apart with 10% of 20 machines an hour."""
ANEW: Final = Budget(evaluations=1000)
NOISES: Final = (10, 30, 50)
CHURNS: Final = (5, 10, 20)
HOURS: Final = 4
MEAN_AWAY_H: Final = 1.0
SECONDS_PER_HOUR: Final = 3600
SIZES_OF_42: Final = (7, *[5] * 7)
DETECTION_US: Final = 10 * US_PER_S
NEVER_US: Final = 10**12
AWAY_US: Final = 120 * US_PER_S


def main() -> None:
    arguments = options(__doc__).parse_args()
    report = Report(
        "planner_churn",
        "Pipelines that change",
        {"state_bytes": STATE_BYTES, "horizons": [HORIZON, CHURN_HORIZON], "hours": HOURS},
    )
    name, tight = "20", published_problem()
    if arguments.full:
        places = [REGIONS[i % len(REGIONS)] for i in range(42)]
        name, tight = "42", published_problem(6, places, SIZES_OF_42, 42)
    problem = replace(tight, rules=PathRules(waves_fit=False))
    start = plan(problem, ANEW).plan
    losses(report, problem, start)
    for percent in NOISES:
        noise(report, name, problem, start, percent)
    for percent in CHURNS:
        churn(report, name, problem, start, percent)
    report.publish(arguments.json)


# --- links that change ---


def noise(report: Report, name: str, problem: Problem, start: Plan, percent: int) -> None:
    """One drawing of rates; the plan was made for the table's."""
    draws = Random(f"noise {percent}")
    now = noisy(problem, percent, draws)
    setting = f"{name}, noise {percent}%"
    left_us = makespan_us(now, start)
    found = {}
    for policy, budget in (("anew", ANEW), ("re-planned", BRIEF)):
        began_s = time.process_time()
        if policy == "anew":
            planned = plan(now, budget)
            end_us, moves, charge_us = planned.makespan_us, moved(start, planned.plan), 0
            legal = violations(now, planned.plan)
        else:
            again = replan(problem, start, now, terms(problem, HORIZON), budget)
            end_us, moves, charge_us = again.makespan_us, len(again.moves), again.cost_us
            legal = violations(again.problem, again.plan)
        found[policy] = end_us, moves, charge_us, time.process_time() - began_s, len(legal)
    ideal_us = found["anew"][0]
    for policy, (end_us, moves, charge_us, used_s, broken) in found.items():
        report.rows.append(row(setting, policy, end_us, ideal_us, moves, used_s, charge_us))
        report.goals.append(Goal(f"{setting}, {policy}: violations", broken, at_most=0))
    report.rows.append(row(setting, "left", left_us, ideal_us, 0, 0.0, 0))
    report.goals.append(
        Goal(f"{setting}: re-planned over left", found["re-planned"][0] / left_us, at_most=1.0)
    )


def noisy(problem: Problem, percent: int, draws: Random) -> Problem:
    """Rates within so many percent of what they are."""
    rates = tuple(
        tuple(rate * draws.randint(100 - percent, 100 + percent) // 100 for rate in rates)
        for rates in problem.bytes_per_s
    )
    return replace(problem, bytes_per_s=rates)


def moved(before: Plan, after: Plan) -> int:
    """Machines with another stage."""
    return sum(a != b for a, b in zip(before.stages, after.stages, strict=True))


def row(
    setting: str, policy: str, end_us: int, ideal_us: int, moves: int, used_s: float, charge_us: int
) -> Row:
    lost = 1 - ideal_us / end_us
    return {
        "setting": setting,
        "policy": policy,
        "iteration s": end_us / US_PER_S,
        "lost s/h": lost * SECONDS_PER_HOUR,
        "changes": 1,
        "moves": float(moves),
        "moves charged s": charge_us / US_PER_S,
        "processor s": used_s,
    }


# --- machines that go and come ---


@dataclass(frozen=True, slots=True)
class Change:
    """From a moment on, these machines of the world are there."""

    at_s: float
    there: tuple[int, ...]


@dataclass(slots=True)
class Account:
    """What a policy has done in some hours.

    Attributes:
        iterations: completed.
        charged_s: time that its moves took from training.
        used_s: processor seconds for all its plans.
        slowest_s: of one plan.
    """

    iterations: float = 0.0
    charged_s: float = 0.0
    moves: int = 0
    changes: int = 0
    used_s: float = 0.0
    slowest_s: float = 0.0
    broken: int = 0


def churn(report: Report, name: str, problem: Problem, start: Plan, percent: int) -> None:
    """Some hours of machines that go and come, by every policy."""
    setting = f"{name}, churn {percent}%/h"
    accounts = {policy: Account() for policy in ("anew", "re-planned", "left")}
    changes = list(changes_of(len(problem.peers), percent))
    ends = [change.at_s for change in changes[1:]] + [float(HOURS * SECONDS_PER_HOUR)]
    spans = [end - change.at_s for change, end in zip(changes, ends, strict=True)]
    anew(accounts["anew"], problem, start, changes, spans)
    replanned(accounts["re-planned"], problem, start, changes, spans)
    left(accounts["left"], problem, start, changes, spans)
    ideal = accounts["anew"].iterations
    for policy, account in accounts.items():
        report.rows.append(account_row(setting, policy, account, ideal))
        report.goals.append(Goal(f"{setting}, {policy}: violations", account.broken, at_most=0))
    again, other = accounts["re-planned"], accounts["left"]
    report.goals += [
        Goal(f"{setting}: iterations, re-planned over anew", again.iterations / ideal, 0.95),
        Goal(f"{setting}: the same over left", again.iterations / other.iterations, 1.0),
        Goal(f"{setting}: moves per change, re-planned", again.moves / again.changes, at_most=3.0),
        Goal(f"{setting}: processor s of the slowest re-plan", again.slowest_s, at_most=10.0),
    ]  # fmt: skip


def changes_of(number: int, percent: int) -> Iterator[Change]:
    """Every machine goes at the same rate, and is back after an hour on the average."""
    draws = Random(f"churn {number} {percent}")
    moments: list[tuple[float, int]] = []
    for machine in range(number):
        at_h = draws.expovariate(percent / 100)
        while at_h < HOURS:
            back_h = at_h + draws.expovariate(1 / MEAN_AWAY_H)
            moments += [(at_h, machine), (back_h, machine)]
            at_h = back_h + draws.expovariate(percent / 100)
    there = set(range(number))
    yield Change(0.0, tuple(sorted(there)))
    for at_h, machine in sorted(moments):
        if at_h < HOURS:
            there ^= {machine}
            yield Change(at_h * SECONDS_PER_HOUR, tuple(sorted(there)))


def anew(
    account: Account,
    problem: Problem,
    start: Plan,
    changes: Sequence[Change],
    spans: Sequence[float],
) -> None:
    """Plan from nothing at every change, and pay nothing for it."""
    stages = dict(enumerate(start.stages))
    for change, span_s in zip(changes, spans, strict=True):
        now = subset(problem, change.there)
        began_s = time.process_time()
        try:
            planned = plan(now, ANEW)
        except NoPlan:
            continue
        charge(account, now, planned.plan, time.process_time() - began_s)
        held = dict(zip(change.there, planned.plan.stages, strict=True))
        account.moves += sum(stages.get(machine) != stage for machine, stage in held.items())
        stages = held
        account.iterations += span_s * US_PER_S / planned.makespan_us


def replanned(
    account: Account,
    problem: Problem,
    start: Plan,
    changes: Sequence[Change],
    spans: Sequence[float],
) -> None:
    """Plan again from the plan before, and pay for moves."""
    before, previous = problem, start
    for change, span_s in zip(changes, spans, strict=True):
        now = subset(problem, change.there)
        began_s = time.process_time()
        again = replan(
            before, previous, now, terms(problem, CHURN_HORIZON), known=[(problem, start)]
        )
        charge(account, again.problem, again.plan, time.process_time() - began_s)
        account.moves += len(again.moves)
        charged_s = min(span_s, again.cost_us / US_PER_S)
        account.charged_s += charged_s
        account.iterations += (span_s - charged_s) * US_PER_S / again.makespan_us
        before, previous = again.problem, again.plan


def left(
    account: Account,
    problem: Problem,
    start: Plan,
    changes: Sequence[Change],
    spans: Sequence[float],
) -> None:
    """Hand the work of what is gone to replicas; whoever comes back has its own again."""
    for change, span_s in zip(changes, spans, strict=True):
        account.changes += 1
        found = relieved(problem, start, subset(problem, change.there))
        if found is not None:
            account.iterations += span_s * US_PER_S / found


def relieved(problem: Problem, start: Plan, now: Problem) -> int | None:
    """The iteration of the old plan on the machines that are there."""
    draft = carried_over(problem, start, now)
    takeover = Takeover(now, Simulator(now), hop_prices(now))
    gone = range(len(now.peers), len(draft.stages))
    for machine in sorted(gone, key=lambda m: draft.stages[m] == 0):
        found = takeover.relieve(draft, machine)
        if found is None:
            return None
        draft = found
    whole = Draft(draft.stages[: len(now.peers)], draft.paths)
    return Simulator(now).run(jobs_of(now, whole.to_plan())).makespan_us


def charge(account: Account, problem: Problem, planned: Plan, used_s: float) -> None:
    account.changes += 1
    account.used_s += used_s
    account.slowest_s = max(account.slowest_s, used_s)
    account.broken += len(violations(problem, planned))


def account_row(setting: str, policy: str, account: Account, ideal: float) -> Row:
    return {
        "setting": setting,
        "policy": policy,
        "iteration s": HOURS * SECONDS_PER_HOUR / account.iterations,
        "lost s/h": (1 - account.iterations / ideal) * SECONDS_PER_HOUR,
        "changes": account.changes,
        "moves": account.moves / HOURS,
        "moves charged s": account.charged_s / HOURS,
        "processor s": account.used_s / account.changes,
    }


# --- a relay lost in the middle ---


def losses(report: Report, problem: Problem, start: Plan) -> None:
    """Every relay, lost at every tenth of the iteration; the mean over all."""
    simulator, jobs = Simulator(problem), jobs_of(problem, start)
    whole_us = makespan_us(problem, start)
    for policy in Policy:
        found = []
        for relay in range(len(problem.peers)):
            replicas = tuple(
                m
                for m, stage in enumerate(start.stages)
                if stage == start.stages[relay] and m != relay
            )
            after_us = AWAY_US if policy is Policy.RETURN else DETECTION_US
            if start.stages[relay]:
                found += [
                    lose(
                        simulator,
                        jobs,
                        Loss(relay, whole_us * part // 10, after_us, policy, replicas),
                    )
                    for part in range(10)
                ]
        ended = [each.makespan_us for each in found if each.makespan_us is not None]
        report.notes.append(
            f"a relay lost, {policy.value}: the iteration takes {fmean(ended) / US_PER_S:.2f} s for"
            f" {whole_us / US_PER_S:.2f}, at most {max(ended) / US_PER_S:.2f};"
            f" {fmean(len(each.dropped) for each in found):.2f} of {len(jobs)} dropped,"
            f" {fmean(each.wasted_us for each in found) / US_PER_S:.2f} s of work wasted, the"
            f" relay's gradient of {fmean(each.untrained for each in found):.2f} lost;"
            f" {len(found) - len(ended)} of {len(found)} block themselves"
        )


# --- what both use ---


def terms(problem: Problem, horizon: int) -> MoveTerms:
    return MoveTerms((STATE_BYTES,) * problem.num_stages, horizon)


def makespan_us(problem: Problem, planned: Plan) -> int:
    """The iteration of a plan; never, where paths block each other."""
    return Simulator(problem).run(jobs_of(problem, planned)).makespan_us or NEVER_US


def subset(problem: Problem, there: Sequence[int]) -> Problem:
    """The problem with these machines alone."""
    relays = problem.num_stages - 1
    origins = max(1, len(there) // problem.visited)
    share, rest = divmod(len(there) - origins, relays)
    return replace(
        problem,
        peers=tuple(problem.peers[m] for m in there),
        latency_us=tuple(tuple(problem.latency_us[a][b] for b in there) for a in there),
        bytes_per_s=tuple(tuple(problem.bytes_per_s[a][b] for b in there) for a in there),
        stage_sizes=(origins, *(share + (stage < rest) for stage in range(relays))),
    )


if __name__ == "__main__":
    main()
