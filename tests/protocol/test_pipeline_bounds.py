"""Lower bounds against brute force: no legal plan is faster."""

from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_settings import small_problem, unequal

from bench.pipeline.brute_force import every_plan
from bench.pipeline.checker import violations
from bench.planner_settings import published_problem
from protocol.pipeline.pipelines import lower_bound_us, round_trips
from protocol.pipeline.simulator import Simulator, jobs_of
from protocol.pipeline.tables import REGIONS

NEVER_US = 10**12
PLACES = st.lists(st.sampled_from(REGIONS), min_size=5, max_size=5)
COMPUTE = st.lists(st.integers(10_000, 500_000), min_size=5, max_size=5)


def best_of_all(problem):
    simulator = Simulator(problem)
    return min(
        (
            simulator.run(jobs_of(problem, each)).makespan_us or NEVER_US
            for each in every_plan(problem)
            if not violations(problem, each)
        ),
        default=NEVER_US,
    )


@pytest.mark.slow
@given(
    case=st.sampled_from(
        [((1, 1, 1), 2, 3), ((2, 1, 1), 2, 3), ((1, 2, 1), 3, 3), ((2, 1, 1), 3, 3), ((2, 2), 2, 4)]
    ),
    slots=st.integers(1, 2),
    places=PLACES,
    compute=COMPUTE,
)
@settings(max_examples=12, deadline=None)
def test_no_plan_is_faster_than_the_bound(case, slots, places, compute):
    sizes, visited, microbatches = case
    problem = small_problem(sizes, visited, microbatches, slots=slots)
    number = sum(sizes)
    problem = unequal(problem, compute[:number], places[:number], slots)
    assert lower_bound_us(problem) <= best_of_all(problem)


def test_the_bound_is_reached_where_nothing_meets():
    """One relay of one slot: two microbatches go one after the other."""
    problem = small_problem((1, 1), 2, 2, slots=1)
    assert lower_bound_us(problem) == best_of_all(problem) == 2 * (525_000 + 4 * 11_000)


def test_the_published_setting_has_a_bound_near_what_is_found():
    bound_s = lower_bound_us(published_problem()) / 1e6
    assert 16 < bound_s < 26.99


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=25, max_size=25))
def test_round_trips_are_the_shortest_walks_that_do_not_turn_back(numbers):
    prices = [numbers[5 * a : 5 * a + 5] for a in range(5)]

    def length(path):
        return sum(prices[a][b] for a, b in pairwise(path))

    for hops in (2, 3, 4, 5):
        found = round_trips(prices, hops)
        for origin in range(5):
            others = [m for m in range(5) if m != origin]
            paths = permutations(others, hops - 1)
            least = min(length((origin, *path, origin)) for path in paths)
            assert found[origin] <= least
            if hops < 5:
                assert found[origin] == least
