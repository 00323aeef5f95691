"""The checker on plans that are wrong in one way each."""

from dataclasses import replace

import pytest
from pipeline_settings import small_problem

from bench.pipeline.checker import violations
from bench.planner_settings import (
    BLIND,
    NO_COLLISIONS,
    SKIPPIPE,
    published_pipelines,
    published_plan,
    published_problem,
)
from protocol.pipeline.problem import PathRules
from protocol.pipeline.simulator import Plan


@pytest.mark.parametrize("schedule", [SKIPPIPE, NO_COLLISIONS, BLIND])
def test_published_plans_are_legal_but_for_stages_that_change_places(schedule):
    found = violations(published_problem(), published_plan(schedule))
    assert all(each.startswith("CC3: stages do not rise") for each in found)
    assert violations(published_problem(6, microbatches=27), published_pipelines()) == []


PROBLEM = small_problem((1, 1, 1, 1), 3, 3, slots=3)
LEGAL = Plan((0, 1, 2, 3), (((1, 2), (2, 3), (1, 3)), (), (), ()))


def test_the_small_plan_is_legal():
    assert violations(PROBLEM, LEGAL) == []


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (Plan((0, 1, 2), ()), "the plan is for 3 machines"),
        (replace(LEGAL, stages=(0, 1, 2, 2)), "stage 2 is held by 2 machines, not 1"),
        (replace(LEGAL, paths=(((1, 2), (2, 3)), (), (), ())), "2 microbatches have a path, not 3"),
        (replace(LEGAL, paths=((), ((1, 2), (2, 3), (1, 3)), (), ())), "CC1: p1 sends"),
        (replace(LEGAL, paths=(((1, 9), (2, 3), (1, 3)), (), (), ())), "does not exist"),
        (replace(LEGAL, paths=(((1, 0), (2, 3), (1, 3)), (), (), ())), "CC1: stage 0 is visited"),
        (replace(LEGAL, paths=(((1,), (2, 3), (1, 3)), (), (), ())), "2 stages are visited, not 3"),
        (replace(LEGAL, paths=(((1, 1), (2, 3), (2, 3)), (), (), ())), "a stage is visited twice"),
        (replace(LEGAL, paths=(((1, 2), (1, 2), (1, 3)), (), (), ())), "CC2: stage 1 trains 3"),
        (replace(LEGAL, paths=(((1, 2), (2, 3), (3, 1)), (), (), ())), "CC3: stages do not rise"),
    ],
)
def test_what_is_wrong_is_told(plan, sentence):
    assert any(sentence in each for each in violations(PROBLEM, plan)), violations(PROBLEM, plan)


@pytest.mark.parametrize(
    ("rules", "path", "sentence"),
    [
        (PathRules(), (2, 1), "CC3: stages do not rise: [2, 1]"),
        (PathRules(max_jump=1), (1, 3), "CC3: a jump of 2, allowed is 1"),
        (PathRules(max_jump=1), (2, 3), "CC3: a jump of 2, allowed is 1"),
    ],
)
def test_limits_of_order(rules, path, sentence):
    plan = Plan((0, 1, 2, 3), ((path,), (), (), ()))
    found = violations(replace(PROBLEM, rules=rules, microbatches=1), plan)
    assert [each.partition(":")[0] for each in found] == ["CC3"]
    assert sentence in found[0]
