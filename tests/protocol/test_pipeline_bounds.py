"""Lower bounds against brute force: no legal plan is faster."""

from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_settings import small_problem, unequal

from bench.pipeline.brute_force import every_plan
from bench.pipeline.checker import violations
from bench.planner_settings import published_problem
from protocol.pipeline.pipelines import closed, lower_bound_us, walks
from protocol.pipeline.problem import PathRules
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
@pytest.mark.parametrize("waves_fit", [True, False])
@given(
    case=st.sampled_from(
        [((1, 1, 1), 2, 3), ((2, 1, 1), 2, 3), ((1, 2, 1), 3, 3), ((2, 1, 1), 3, 3), ((2, 2), 2, 4)]
    ),
    slots=st.integers(1, 2),
    places=PLACES,
    compute=COMPUTE,
)
@settings(max_examples=12, deadline=None)
def test_no_plan_is_faster_than_the_bound(waves_fit, case, slots, places, compute):
    sizes, visited, microbatches = case
    problem = small_problem(
        sizes, visited, microbatches, slots=slots, rules=PathRules(waves_fit=waves_fit)
    )
    number = sum(sizes)
    problem = unequal(problem, compute[:number], places[:number], slots)
    assert lower_bound_us(problem) <= best_of_all(problem)


def test_the_bound_is_reached_where_nothing_meets():
    """One relay of one slot: two microbatches go one after the other."""
    problem = small_problem((1, 1), 2, 2, slots=1)
    assert lower_bound_us(problem) == best_of_all(problem) == 2 * (525_000 + 4 * 11_000)


@pytest.mark.slow
def test_a_far_relay_that_every_wave_needs_is_in_the_bound():
    """Near relays alone would do, but have no slots for the other data peer's microbatches."""
    places = ["NL", "NL", "NL", "Australia"]
    problem = small_problem((2, 2), 2, 4, slots=1)
    problem = unequal(problem, [200_000] * 4, places, 1)
    loose = small_problem((2, 2), 2, 4, slots=1, rules=PathRules(waves_fit=False))
    loose = unequal(loose, [200_000] * 4, places, 1)
    assert lower_bound_us(problem) > 1.3 * lower_bound_us(loose)
    assert lower_bound_us(problem) <= best_of_all(problem)


def test_the_published_setting_has_a_bound_near_what_is_found():
    bound_s = lower_bound_us(published_problem()) / 1e6
    assert 22 < bound_s < 26.99


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=25, max_size=25))
def test_walks_are_the_shortest_that_do_not_turn_back(numbers):
    prices = [numbers[5 * a : 5 * a + 5] for a in range(5)]

    def length(path):
        return sum(prices[a][b] for a, b in pairwise(path))

    short = walks(prices, 3)
    around = [closed(prices, hops) for hops in (2, 3, 4)]
    for origin in range(5):
        others = [m for m in range(5) if m != origin]
        for end in others:
            for hops in (1, 2, 3):
                paths = permutations([m for m in others if m != end], hops - 1)
                least = min(length((origin, *path, end)) for path in paths)
                assert short[hops - 1][origin, end] == least
            for place, hops in enumerate((2, 3, 4)):
                rounds = (p for p in permutations(others, hops - 1) if end in p)
                least = min(length((origin, *path, origin)) for path in rounds)
                assert around[place][origin, end] <= least
                if hops < 4:
                    assert around[place][origin, end] == least
