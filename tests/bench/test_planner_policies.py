"""The pure part of the measurement of policies: who takes which stage, and when."""

from dataclasses import replace

import pytest

from bench.planner_churn import Change
from bench.planner_policies import PERIOD_S, Ours, Swarm, World, pace_us
from bench.planner_settings import SKIPPIPE, published_plan, published_problem
from protocol.pipeline.problem import PathRules
from protocol.run.assignment import CROWDED_S, EMPTY_S

PROBLEM = replace(published_problem(), rules=PathRules(waves_fit=False))
HELD = dict(enumerate(published_plan(SKIPPIPE).stages))
FIRST_STAGE = [machine for machine, stage in HELD.items() if stage == 1]
MOVED = HELD | {FIRST_STAGE[0]: 2, FIRST_STAGE[1]: 2}


def test_swarm_moves_one_machine_in_a_period_from_the_least_loaded_stage_to_the_most_loaded():
    policy = Swarm(PROBLEM)
    assert policy.stage_for(MOVED) == 1
    assert policy.move(MOVED, PERIOD_S / 2) is None
    found = policy.move(MOVED, PERIOD_S)
    assert found is not None
    assert (MOVED[found[0]], found[1]) == (2, 1)
    assert policy.move(HELD, PERIOD_S) is None  # 3 machines each: a move evens nothing
    assert policy.next_s(PERIOD_S) == 2 * PERIOD_S


@pytest.mark.parametrize(("left", "wait_s"), [(1, CROWDED_S), (0, EMPTY_S)])
def test_ours_moves_when_a_stage_has_been_short_for_long(left, wait_s):
    held = MOVED | ({} if left else {FIRST_STAGE[2]: 3})
    policy = Ours(PROBLEM)
    assert policy.move(held, 10.0) is None
    assert policy.next_s(10.0) == 10.0 + wait_s
    found = policy.move(held, 10.0 + wait_s)
    assert found is not None
    assert found[1] == 1


def test_a_stage_that_nobody_holds_is_left_out_by_ours_alone():
    held = {machine: stage for machine, stage in HELD.items() if stage != 1}
    assert pace_us(PROBLEM, held, Swarm(PROBLEM)) is None
    assert pace_us(PROBLEM, held, Ours(PROBLEM)) is not None


def test_a_machine_that_takes_a_stage_works_when_it_has_its_state():
    world = World(PROBLEM, Swarm(PROBLEM), dict(HELD))
    gone = FIRST_STAGE[0]
    there = tuple(sorted(HELD))
    away = tuple(machine for machine in there if machine != gone)
    world._change(away, 0.0)
    assert gone not in world._working(0.0)
    world._change(there, 100.0)
    assert world.held[gone] == 1
    rates = [PROBLEM.rate(machine, gone) for machine in FIRST_STAGE[1:]]
    assert world.ready_s[gone] == pytest.approx(100 + 4e9 / max(rates) + 10)
    assert gone not in world._working(100.0)
    assert gone in world._working(world.ready_s[gone])


def test_hours_are_played_to_their_end():
    world = World(PROBLEM, Swarm(PROBLEM), dict(HELD))
    world.paces[tuple(sorted(HELD.items()))] = 30_000_000
    world.play([Change(0.0, tuple(sorted(HELD)))])
    assert world.account.iterations == pytest.approx(4 * 3600 / 30)
    assert world.account.moves == 0
