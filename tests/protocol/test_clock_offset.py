import random

import pytest
from existing import existing

from protocol.membership.clock_offset import (
    MAX_CLOCK_PEERS,
    MAX_SAMPLES_PER_PEER,
    ClockOffsetEstimator,
)


def test_nothing_is_known_without_samples():
    assert ClockOffsetEstimator().estimate() is None


def test_one_exact_sample():
    estimator = ClockOffsetEstimator()
    estimator.add("a", their_time_s=1060.0, round_trip_s=0.2, our_time_s=1000.1)
    estimate = existing(estimator.estimate())
    assert estimate.offset_s == pytest.approx(60.0)
    assert estimate.uncertainty_s == pytest.approx(0.1)
    assert estimate.num_peers == 1


def test_lopsided_delays_stay_within_the_stated_uncertainty():
    rng = random.Random(3)
    for _ in range(200):
        there, back = rng.uniform(0, 0.5), rng.uniform(0, 0.5)
        estimator = ClockOffsetEstimator()
        estimator.add("a", 500.0 + there - 60.0, there + back, 500.0 + there + back)
        estimate = existing(estimator.estimate())
        assert abs(estimate.offset_s + 60.0) <= estimate.uncertainty_s + 1e-9


def test_the_best_round_trip_of_a_peer_counts():
    estimator = ClockOffsetEstimator()
    estimator.add("a", 1005.0, 8.0, 1000.0)
    estimator.add("a", 1001.0, 0.0, 1000.0)
    estimator.add("a", 1004.0, 6.0, 1000.0)
    assert existing(estimator.estimate()).offset_s == 1.0


def test_less_than_half_of_the_peers_cannot_move_it_out_of_the_honest_range():
    estimator = ClockOffsetEstimator()
    for n in range(4):
        estimator.add(f"honest{n}", 1060.0 + n / 10, 0.0, 1000.0)
    for n in range(3):
        estimator.add(f"liar{n}", 1e9 * (n + 1), 0.0, 1000.0)
    assert 60.0 <= existing(estimator.estimate()).offset_s <= 60.31


def test_disagreement_shows_in_the_uncertainty():
    estimator = ClockOffsetEstimator()
    for n, offset in enumerate((0.0, 100.0)):
        estimator.add(f"p{n}", 1000.0 + offset, 0.0, 1000.0)
    assert existing(estimator.estimate()).offset_s == 50.0
    assert existing(estimator.estimate()).uncertainty_s == 50.0


@pytest.mark.parametrize(
    ("their_time_s", "round_trip_s"),
    [
        (float("nan"), 0.1),
        (float("inf"), 0.1),
        (1000.0, -1.0),
        (1000.0, 11.0),
        (1000.0, float("nan")),
    ],
)
def test_useless_samples_are_not_kept(their_time_s, round_trip_s):
    estimator = ClockOffsetEstimator()
    estimator.add("a", their_time_s, round_trip_s, 1000.0)
    assert estimator.estimate() is None


def test_memory_is_bounded_and_old_samples_are_pushed_out():
    estimator = ClockOffsetEstimator()
    for n in range(3 * MAX_CLOCK_PEERS):
        estimator.add(f"p{n}", 1000.0, 0.0, 1000.0)
    assert existing(estimator.estimate()).num_peers == MAX_CLOCK_PEERS
    estimator.clear()
    estimator.add("a", 1000.0, 0.0, 1000.0)
    for _ in range(MAX_SAMPLES_PER_PEER):
        estimator.add("a", 1060.05, 0.1, 1000.1)
    assert existing(estimator.estimate()).offset_s == pytest.approx(60.0)


def test_a_peer_that_left_counts_no_longer():
    estimator = ClockOffsetEstimator()
    estimator.add("a", 1000.0, 0.0, 1000.0)
    estimator.add("b", 1060.0, 0.0, 1000.0)
    estimator.forget("b")
    estimator.forget("never there")
    assert existing(estimator.estimate()).offset_s == 0.0


def _settle(skews_s, follows, rounds=40):
    """Corrected clocks (s ahead of the truth) after everybody has followed its peers some times."""
    offsets_s = [0.0] * len(skews_s)
    for _ in range(rounds):
        shown_s = [skew + offset for skew, offset in zip(skews_s, offsets_s, strict=True)]
        for me, theirs in enumerate(follows):
            estimator = ClockOffsetEstimator()
            for peer in theirs:
                estimator.add(f"p{peer}", 1000.0 + shown_s[peer], 0.0, 1000.0 + skews_s[me])
            offsets_s[me] = existing(estimator.estimate(offsets_s[me])).offset_s
    return [skew + offset for skew, offset in zip(skews_s, offsets_s, strict=True)]


def test_peers_that_follow_each_other_come_to_agree():
    assert _settle([0.0, 60.0], [[1], [0]]) == pytest.approx([30.0, 30.0])
    ring = _settle([0.0, 60.0, -30.0], [[1], [2], [0]])
    assert max(ring) - min(ring) < 0.01
    everybody = [[other for other in range(5) if other != me] for me in range(5)]
    assert _settle([0.0, 0.0, 0.0, 60.0, -3600.0], everybody) == pytest.approx([0.0] * 5)
