import random

import pytest
from existing import existing

from protocol.limits import MAX_CLOCK_OFFSET_S, MAX_LINKS
from protocol.membership.clock_offset import (
    MAX_SAMPLES_PER_PEER,
    ClockOffsetEstimator,
)


def test_nothing_is_known_without_samples():
    assert ClockOffsetEstimator().estimate() is None


def test_one_exact_sample():
    estimator = ClockOffsetEstimator()
    estimator.add("a", their_time_s=1060.0, round_trip_s=0.2, our_time_s=1000.1)
    assert estimator.estimate() == pytest.approx(60.0)


def test_lopsided_delays_move_it_by_half_a_round_trip_at_most():
    rng = random.Random(3)
    for _ in range(200):
        there, back = rng.uniform(0, 0.5), rng.uniform(0, 0.5)
        estimator = ClockOffsetEstimator()
        estimator.add("a", 500.0 + there - 60.0, there + back, 500.0 + there + back)
        assert abs(existing(estimator.estimate()) + 60.0) <= (there + back) / 2 + 1e-9


def test_the_best_round_trip_of_a_peer_counts():
    estimator = ClockOffsetEstimator()
    estimator.add("a", 1005.0, 8.0, 1000.0)
    estimator.add("a", 1001.0, 0.0, 1000.0)
    estimator.add("a", 1004.0, 6.0, 1000.0)
    assert existing(estimator.estimate()) == 1.0


def test_less_than_half_of_the_peers_cannot_move_it_out_of_the_honest_range():
    estimator = ClockOffsetEstimator()
    for n in range(4):
        estimator.add(f"honest{n}", 1060.0 + n / 10, 0.0, 1000.0)
    for n in range(3):
        estimator.add(f"liar{n}", 1000.0 + MAX_CLOCK_OFFSET_S * (-1) ** n, 0.0, 1000.0)
    assert 60.0 <= existing(estimator.estimate()) <= 60.31


def test_of_two_clocks_the_middle_counts():
    estimator = ClockOffsetEstimator()
    for n, offset in enumerate((0.0, 100.0)):
        estimator.add(f"p{n}", 1000.0 + offset, 0.0, 1000.0)
    assert existing(estimator.estimate()) == 50.0


@pytest.mark.parametrize(
    ("their_time_s", "round_trip_s"),
    [
        (float("nan"), 0.1),
        (float("inf"), 0.1),
        (1000.0, -1.0),
        (1000.0, 11.0),
        (1000.0, float("nan")),
        (1000.0 + 1.01 * MAX_CLOCK_OFFSET_S, 0.1),
        (1000.0 - 1.01 * MAX_CLOCK_OFFSET_S, 0.1),
        (5e11, 0.1),
    ],
)
def test_useless_samples_are_not_kept(their_time_s, round_trip_s):
    estimator = ClockOffsetEstimator()
    estimator.add("a", their_time_s, round_trip_s, 1000.0)
    assert estimator.estimate() is None


def test_memory_is_bounded_and_old_samples_are_pushed_out():
    estimator = ClockOffsetEstimator()
    for n in range(3 * MAX_LINKS):
        estimator.add(f"p{n}", 1000.0, 0.0, 1000.0)
    assert len(estimator._samples) == MAX_LINKS
    estimator = ClockOffsetEstimator()
    estimator.add("a", 1000.0, 0.0, 1000.0)
    for _ in range(MAX_SAMPLES_PER_PEER):
        estimator.add("a", 1060.05, 0.1, 1000.1)
    assert existing(estimator.estimate()) == pytest.approx(60.0)
