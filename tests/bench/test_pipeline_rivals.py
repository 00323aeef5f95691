"""The rivals of the pipeline planner: each does what it is described to do."""

from dataclasses import replace
from itertools import permutations

import pytest

from bench.pipeline.checker import violations
from bench.pipeline.columns import at_full_depth, columns_of, full_pipelines, shared_pipelines
from bench.pipeline.conflicts import Effort, conflict_search
from bench.pipeline.genetic import Breeding, arranged, groups_of
from bench.pipeline.matching import bottleneck
from bench.pipeline.rivals import RIVALS, priced_us
from bench.pipeline.settings import random_tables, usual
from bench.pipeline.tour import shortest_tour
from bench.pipeline.wiring import agora, swarm
from bench.planner_settings import SKIPPIPE, published_plan, published_problem

BRIEF = Breeding(population=6, children=40)


def test_the_bottleneck_is_the_least_that_pairs_all():
    # The cheapest pair (1) may not be taken: it would leave 9 for the other row.
    assert bottleneck([[1, 3], [2, 9]]) == (3, [1, 0])
    wide = [[7, 2, 9, 4, 8], [6, 1, 9, 9, 9], [5, 3, 9, 9, 9]]
    worst, columns = bottleneck(wide)
    assert worst == min(
        max(wide[row][c] for row, c in enumerate(chosen)) for chosen in permutations(range(5), 3)
    )
    assert len(set(columns)) == 3
    assert max(wide[row][c] for row, c in enumerate(columns)) == worst


def test_the_tour_is_the_shortest_of_all():
    prices = [[0, 3, 9, 4, 8], [3, 0, 2, 7, 6], [9, 2, 0, 5, 1], [4, 7, 5, 0, 3], [8, 6, 1, 3, 0]]
    best = min(
        sum(prices[a][b] for a, b in zip((0, *rest), (*rest, 0), strict=True))
        for rest in permutations(range(1, 5))
    )
    length, order = shortest_tour(prices)
    assert length == best
    assert sum(prices[a][b] for a, b in zip(order, (*order[1:], 0), strict=True)) == best


def test_conflict_search_on_the_published_arrangement_is_near_the_time_of_paths_that_go_back():
    """With SkipPipe's swaps it found the published 33.314 s to the digit, last in d6cbf1c2."""
    problem = published_problem()
    stages = published_plan(SKIPPIPE).stages
    plan = conflict_search(problem, stages, Effort())
    assert priced_us(problem, plan) == 35_872_564
    assert violations(problem, plan) == []
    paths = {each for each in plan.paths if each}
    assert all(len(set(each)) == 1 for each in paths)  # slots are merged: one path a data peer


def test_the_same_seed_gives_the_same_arrangement_of_the_right_sizes():
    problem = published_problem()
    stages = arranged(problem, BRIEF)
    assert stages == arranged(problem, BRIEF)
    assert [len(group) for group in groups_of(stages)] == list(problem.stage_sizes)


def test_columns_share_no_machine_and_full_pipelines_walk_them():
    problem = published_problem()
    columns = columns_of(problem, arranged(problem, BRIEF))
    machines = [machine for column in columns for machine in column]
    assert len(columns) == 3
    assert len(set(machines)) == len(machines) == 18
    full = at_full_depth(problem)
    alone = full_pipelines(full, arranged(problem, BRIEF))
    assert sorted(len(paths) for paths in alone.paths if paths) == [10, 10, 10]
    shared = shared_pipelines(full, arranged(problem, BRIEF))
    assert sorted(len(paths) for paths in shared.paths if paths) == [6] * 5
    used = {path for paths in shared.paths for path in paths}
    assert used <= {column[1:] for column in columns}


def test_swarm_spreads_alike_where_all_machines_are_alike():
    problem = at_full_depth(usual()[2].problem)  # one cluster
    stages = arranged(problem, BRIEF)
    plan = swarm(problem, stages)
    for paths in filter(None, plan.paths):  # every data peer has its own heap: 6 over 3 replicas
        for place in range(5):
            used = [path[place] for path in paths]
            assert sorted(used.count(machine) for machine in set(used)) == [2, 2, 2]


def test_agora_avoids_the_machine_that_would_be_done_late():
    problem = at_full_depth(usual()[2].problem)
    stages = arranged(problem, BRIEF)
    slow = groups_of(stages)[1][0]
    peers = [*problem.peers]
    peers[slow] = replace(peers[slow], forward_us=60_000_000)
    problem = replace(problem, peers=tuple(peers))
    used = [relay for paths in agora(problem, stages).paths for path in paths for relay in path]
    assert slow not in used


@pytest.mark.slow
@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
def test_every_rival_plans_within_the_rules_that_it_is_given(rival):
    for setting in (usual()[3], random_tables(1)[0]):
        problem = rival.posed(setting.problem)
        plan = rival.plan(problem, arranged(setting.problem, BRIEF))
        assert violations(problem, plan) == []
