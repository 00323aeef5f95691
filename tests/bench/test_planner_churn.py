"""The pure part of the measurement of pipelines that change."""

from dataclasses import replace
from itertools import pairwise
from random import Random

from existing import existing

from bench.planner_churn import HOURS, SECONDS_PER_HOUR, changes_of, noisy, relieved, subset
from bench.planner_settings import SKIPPIPE, published_plan, published_problem
from protocol.pipeline.plan import jobs_of
from protocol.pipeline.problem import PathRules
from protocol.pipeline.simulator import Simulator

PROBLEM = replace(published_problem(), rules=PathRules(waves_fit=False))
START = published_plan(SKIPPIPE)


def test_machines_go_and_come_one_by_one_from_a_seed():
    changes = list(changes_of(20, 20))
    assert changes == list(changes_of(20, 20)) != list(changes_of(20, 10))
    assert changes[0].there == tuple(range(20))
    assert all(a.at_s <= b.at_s < HOURS * SECONDS_PER_HOUR for a, b in pairwise(changes))
    assert all(len(set(a.there) ^ set(b.there)) == 1 for a, b in pairwise(changes))
    gone = sum(len(a.there) > len(b.there) for a, b in pairwise(changes))
    assert 8 <= gone <= 24  # 16 in four hours, on the average


def test_a_part_of_the_machines_is_a_problem_of_its_own():
    now = subset(PROBLEM, [m for m in range(20) if m not in (4, 7)])
    assert now.stage_sizes == (4, 3, 3, 3, 3, 2)
    assert now.peers[4] == PROBLEM.peers[5]
    assert now.bytes_per_s[4][6] == PROBLEM.bytes_per_s[5][8]


def test_an_old_plan_goes_on_with_replicas_until_a_stage_has_nobody():
    whole = existing(Simulator(PROBLEM).run(jobs_of(PROBLEM, START)).makespan_us)
    assert relieved(PROBLEM, START, PROBLEM) == whole
    one_less = relieved(PROBLEM, START, subset(PROBLEM, [m for m in range(20) if m != 15]))
    assert one_less is not None
    assert one_less > whole
    first_stage = {m for m, stage in enumerate(START.stages) if stage == 1}
    nobody = subset(PROBLEM, [m for m in range(20) if m not in first_stage])
    assert relieved(PROBLEM, START, nobody) is None


def test_noise_stays_within_its_bounds():
    now = noisy(PROBLEM, 30, Random(1))
    shares = [
        now.bytes_per_s[a][b] / PROBLEM.bytes_per_s[a][b]
        for a in range(20) for b in range(20) if a != b
    ]  # fmt: skip
    assert 0.69 < min(shares) < 0.75
    assert 1.25 < max(shares) < 1.31
