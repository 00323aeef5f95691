"""Quotas, places in nominal steps, jumps and losses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.schedule.deadline import FIRST_OBSERVATIONS, SPREADS, ObservedDeadline
from protocol.schedule.rounds import (
    LARGEST_RATIO,
    LOST_LAG_ROUNDS,
    TOGETHER_ROUNDS,
    OwnRounds,
    Quotas,
    catch_up,
    is_left_behind,
    is_lost,
    is_overdone,
    keep_together,
    next_round,
    oldest_useful,
    owed_steps,
    place,
)


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (10.0, [10.0, 10.0, 10.0], 50),
        (10.5, [10.0, 10.5, 9.8], 50),
        (20.0, [10.0, 10.0, 20.0], 100),
        (2.5, [10.0, 10.0, 2.5], 12.5),
        (0.001, [10.0, 10.0, 0.001], 50 / LARGEST_RATIO),
        (1000.0, [10.0, 10.0, 1000.0], 50 * LARGEST_RATIO),
        (10.0, [], 50),
        (0.0, [10.0], 50),
    ],
)
def test_a_peer_owes_steps_by_its_speed(own: float, others: list[float], expected: float) -> None:
    assert owed_steps(50, own, others) == pytest.approx(expected)


@pytest.mark.parametrize("told", [5e-324, 1e-300, 1e-9, 1e12])
def test_speeds_that_cannot_be_make_no_round_endless_and_no_step_a_run(told):
    most = 50 * LARGEST_RATIO if told < 1 else 50 / LARGEST_RATIO
    assert owed_steps(50, 10.0, [told, told, 10.0]) == most


def test_a_round_ends_early_when_twice_what_is_owed_by_now_is_done():
    assert not is_overdone(0.9, 800.0, 800.0)
    assert not is_overdone(1.0, 99.0, 50.0)
    assert not is_overdone(0.1, 800.0, 50.0)
    assert is_overdone(0.125, 800.0, 50.0)
    assert not is_overdone(3.0, 50.0, 50.0), "beyond its quota it only waits for its exchange"


H = 50
OWN = 4 * H
LAGS = [([], 0.0), ([0.0], 0.0), ([-0.8, -0.1], -0.45), ([0.2, 0.2, 5.0], 0.2), ([0.9], 0.9)]
"""How far the others are ahead, in rounds, and their median."""


@pytest.mark.parametrize(("ahead", "lag"), LAGS)
def test_a_peer_behind_shortens_its_round_by_half_at_most(ahead: list[float], lag: float) -> None:
    places = [OWN + rounds * H for rounds in ahead]
    assert catch_up(40.0, OWN, places, H) == pytest.approx(40 * (1 - min(0.5, max(0.0, lag))))


@pytest.mark.parametrize(("lead", "times"), [(0.9, 1.0), (1.5, 1.5), (15.0, 2.0)])
def test_with_fragments_a_peer_more_than_a_round_ahead_lets_the_others_come(
    lead: float, times: float
) -> None:
    assert catch_up(40.0, OWN, [OWN - lead * H] * 3, H) == pytest.approx(40 * times)


@pytest.mark.parametrize(("ahead", "lag"), [*LAGS, ([-0.9, -3.0, -0.7], -0.9), ([6.0], 1.5)])
def test_where_nobody_waits_the_nominal_pace_follows_the_lag(
    ahead: list[float], lag: float
) -> None:
    places = [OWN + rounds * H for rounds in ahead]
    owed = keep_together(40.0, OWN, places, H)
    assert 40.0 / owed == pytest.approx(1 + lag / TOGETHER_ROUNDS)


@pytest.mark.parametrize("lag", [0.1, 0.9, 1.5, 40.0])
def test_peers_ahead_are_slowed_down_as_much_as_those_behind_are_sped_up(lag: float) -> None:
    behind, ahead = (keep_together(40.0, OWN, [OWN + rounds * H], H) for rounds in (lag, -lag))
    assert (40.0 / behind + 40.0 / ahead) / 2 == pytest.approx(1.0)
    assert 40.0 / behind <= 1.5


def test_where_a_peer_is_by_now_is_guessed_from_when_it_told_us() -> None:
    assert place(160, 0.0, 5.0, H) == 160
    assert place(160, 2.0, 5.0, H) == pytest.approx(170)
    assert place(160, 9.0, 5.0, H) == pytest.approx(205), "its round may be longer than another"
    assert place(160, 11.0, 5.0, H) == 160 + H, "what it has not told is not believed for ever"
    assert place(160, 11.0, 0.0, H) == 160
    assert place(160, -1.0, 5.0, H) == 160


@pytest.mark.parametrize("owed", [1.0, 1.9, 2.4, 3.6, 8 / 3, 50.0, 0.7 * 50])
def test_what_is_owed_is_done_on_the_whole_and_never_before(owed: float) -> None:
    quotas, done = Quotas(), 0
    for rounds in range(1, 200):
        done += quotas.next(owed)
        assert rounds * owed - 1 < done <= rounds * owed + 1e-6


def test_a_late_peer_of_few_steps_does_fewer() -> None:
    quotas = Quotas()
    assert [quotas.next(owed) for owed in (2.0, 1.8, 1.8, 2.0, 2.0)] == [2, 1, 2, 2, 2]


def test_who_owes_less_than_a_step_does_one_and_runs_up_no_debt() -> None:
    quotas = Quotas()
    assert [quotas.next(0.3) for _ in range(20)] == [1] * 20
    assert quotas.next(3.0) == 3


def test_a_peer_one_round_behind_catches_up_and_further_behind_jumps() -> None:
    assert next_round(4, [5, 6]) == 5
    assert next_round(4, [5, 7]) == 5
    assert next_round(4, [7, 7]) == next_round(4, [7]) == 7
    assert next_round(4, []) == 5
    assert not is_left_behind(5, [6])
    assert is_left_behind(5, [7])


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(0, 10**9))
def test_one_peer_that_lies_brings_nobody_beyond_where_honest_peers_are(
    honest: list[int], lie: int
) -> None:
    """Point by point: the next round, whether one is given up, and whether our weights are lost."""
    heard = [*honest, lie]
    assert next_round(4, heard) <= max(5, *honest)
    assert not is_left_behind(max(honest), heard)
    assert not is_lost(max(honest), heard, H)


def test_one_beat_that_claims_the_last_round_moves_nobody() -> None:
    assert next_round(4, [5, 999]) == 5
    assert not is_left_behind(5, [5, 999])
    assert not is_lost(5, [6, 999.0 * H], H)
    assert oldest_useful([6, 999 * H], H) == 0


@pytest.mark.parametrize(("told", "owed"), [(0.0, 50), (1e-9, 100), (40.0, 20), (1e9, 3.125)])
def test_the_only_other_peer_changes_what_we_owe_within_bounds(told: float, owed: float) -> None:
    assert owed_steps(50, 10.0, [told, 10.0]) == pytest.approx(owed)


def test_a_peer_far_behind_is_lost() -> None:
    far = LOST_LAG_ROUNDS * H
    assert not is_lost(5, [], H)
    assert not is_lost(5, [5 + far], H)
    assert is_lost(5, [5 + far + 1], H)


def test_one_peer_that_says_it_is_far_ahead_makes_nobody_lost() -> None:
    lie = 5 + 1000.0 * H
    assert not is_lost(5, [5, 6, lie], H)
    assert is_lost(5, [5, lie, lie], H)


def test_deadline_follows_what_was_observed() -> None:
    deadline = ObservedDeadline(floor_s=0.1, ceiling_s=30)
    assert deadline.current_s == deadline.bound_s(math.inf) == 30
    assert deadline.bound_s(0.5) == 0.5 * SPREADS
    assert deadline.bound_s(0.0) == 0.1
    for _ in range(FIRST_OBSERVATIONS):
        deadline.observe(1.0)
    assert deadline.current_s == deadline.bound_s(0.5) == 2.0
    deadline.observe(1000.0)
    assert deadline.current_s == 2.0
    for _ in range(100):
        deadline.observe(0.001)
    assert deadline.current_s == 0.1


def test_deadline_refuses_an_empty_range() -> None:
    with pytest.raises(ValueError, match="floor"):
        ObservedDeadline(floor_s=2, ceiling_s=1)


@pytest.mark.parametrize("heard", [[], [30], [10 * LOST_LAG_ROUNDS + 7, 2], [1000, 990, 5]])
def test_the_oldest_useful_step_is_the_first_that_is_not_lost(heard: list[float]) -> None:
    oldest = oldest_useful(heard, 10)
    assert not is_lost(oldest, heard, 10)
    assert oldest == 0 or is_lost(oldest - 1, heard, 10)


def test_peers_of_a_budget_owe_a_round_together() -> None:
    speeds = [10.0, 20.0, 5.0]
    owed = [owed_steps(70, speed, speeds, together=True) for speed in speeds]
    assert owed == pytest.approx([20.0, 40.0, 10.0])
    assert sum(owed) == pytest.approx(70)
    assert owed_steps(70, 10.0, [10.0], together=True) == 70
    liar = owed_steps(70, 10.0, [10.0, 10.0, 1e9], together=True)
    assert liar == pytest.approx(70 / 18), "one counts LARGEST_RATIO times us at most"
    many = [10.0] * 140
    assert owed_steps(70, 10.0, many, together=True) == 0.5


def test_a_round_of_less_than_a_step_is_longer() -> None:
    rounds = OwnRounds("me", 20, lambda _: 1000, 0, 0.0, varied=0.0)
    trained = 0
    while not rounds.is_over:
        plan = rounds.plan(0.4)
        assert (plan.quota, plan.stride) == (1, 50.0)
        trained += plan.quota
        rounds.closed(plan.start_step + plan.quota * plan.stride, [])
    assert trained == 1000 / 20 * 0.4
