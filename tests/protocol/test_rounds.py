"""Quotas, nominal steps and jumps."""

import pytest

from protocol.deadline import FIRST_OBSERVATIONS, ObservedDeadline
from protocol.rounds import (
    LOST_LAG_ROUNDS,
    catch_up,
    is_left_behind,
    is_lost,
    next_round,
    nominal_step,
    quota,
)


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (10.0, [10.0, 10.0, 10.0], 50),
        (10.5, [10.0, 10.5, 9.8], 50),
        (20.0, [10.0, 10.0, 20.0], 100),
        (2.5, [10.0, 10.0, 2.5], 12),
        (0.001, [10.0, 10.0, 0.001], 1),
        (10.0, [], 50),
        (0.0, [10.0], 50),
    ],
)
def test_quota_follows_speed(own: float, others: list[float], expected: int) -> None:
    assert quota(50, own, others) == expected


@pytest.mark.parametrize(
    ("others", "expected"),
    [([], 50), ([4.0], 50), ([3.2, 3.9], 50), ([4.2, 4.2, 9.0], 40), ([4.9], 25), ([6.0], 25)],
)
def test_a_peer_behind_shortens_its_round_by_half_at_most(
    others: list[float], expected: int
) -> None:
    assert catch_up(50, 4, others) == expected


def test_nominal_step_stays_inside_its_round() -> None:
    assert nominal_step(3, 50, 0.0) == 150
    assert nominal_step(3, 50, 0.5) == 175
    assert nominal_step(3, 50, 1.7) == 200
    assert nominal_step(3, 50, -1.0) == 150


def test_a_peer_one_round_behind_catches_up_and_further_behind_jumps() -> None:
    assert next_round(4, [5, 6]) == 5
    assert next_round(4, [5, 7]) == 7
    assert next_round(4, []) == 5
    assert not is_left_behind(5, [6])
    assert is_left_behind(5, [7])


def test_a_peer_far_behind_is_lost() -> None:
    assert not is_lost(5, [])
    assert not is_lost(5, [5 + LOST_LAG_ROUNDS])
    assert is_lost(5, [5 + LOST_LAG_ROUNDS + 1])


def test_deadline_follows_what_was_observed() -> None:
    deadline = ObservedDeadline(floor_s=0.1, ceiling_s=30)
    assert deadline.current_s == 30
    for _ in range(FIRST_OBSERVATIONS):
        deadline.observe(1.0)
    assert deadline.current_s == 2.0
    deadline.observe(1000.0)
    assert deadline.current_s == 2.0
    for _ in range(100):
        deadline.observe(0.001)
    assert deadline.current_s == 0.1
    assert deadline.statistics().median_s == 0.001


def test_deadline_refuses_an_empty_range() -> None:
    with pytest.raises(ValueError, match="floor"):
        ObservedDeadline(floor_s=2, ceiling_s=1)
