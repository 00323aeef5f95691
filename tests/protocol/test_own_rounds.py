"""The rounds of gossip: quotas, debts, jumps, the last round; and the patience for new partners."""

import random

import pytest

from protocol.gossip.matchmaking import LUMP_SHARE, SAVED_SHARE, Patience
from protocol.schedule.rounds import JUMP_ROUNDS, VARIED, OwnRounds

H = 20


def rounds(total: int = 1000, step: float = 0.0) -> OwnRounds:
    """Rounds of equal lengths."""
    return OwnRounds("a", H, lambda _: total, 0, step, varied=0.0)


def varied_quotas(peer_id: str, count: int) -> list[int]:
    own = OwnRounds(peer_id, H, lambda _: 10**9, 0, 0.0)
    found = []
    for _ in range(count):
        plan = own.plan(H)
        found.append(plan.quota)
        own.closed(plan.start_step + plan.quota, [])
    return found


def test_rounds_of_equal_quotas_follow_each_other() -> None:
    own = rounds()
    for number in range(3):
        plan = own.plan(H)
        assert (plan.round, plan.quota, plan.start_step, plan.stride) == (number, H, number * H, 1)
        own.closed(plan.start_step + H, [])


def test_rounds_of_a_length_of_our_own_are_planned_by_it_at_the_pace_of_all() -> None:
    own = OwnRounds("a", H, lambda _: 10**9, 0, 0.0)
    own.length = 4 * H
    quotas = []
    for _ in range(400):
        plan = own.plan(H / 2)  # half as fast as the others: two nominal steps in one of ours
        assert plan.stride == 2
        quotas.append(plan.quota)
        own.closed(plan.start_step + 2 * plan.quota, [])
    assert sum(quotas) / len(quotas) == pytest.approx(2 * H, rel=0.03)
    assert max(quotas) - min(quotas) > VARIED * 2 * H


def test_a_round_that_is_closed_early_leaves_less_than_a_step_to_make_up_for() -> None:
    own = rounds()
    own.plan(H / 2)
    own.closed(4.0, [])
    assert (own.step, own.debt) == (4.0, -2.0)


def test_rounds_of_the_final_averaging_leave_no_credit_to_a_run_that_goes_on() -> None:
    own = rounds(total=H)
    own.plan(H)
    own.closed(H, [])
    for _ in range(4):
        own.plan(1.0)
        own.closed(H, [])
    assert own.debt == 0.0


def test_a_shorter_length_of_our_own_keeps_the_bounds_in_nominal_rounds() -> None:
    own = rounds()
    own.length = 2
    own.plan(H)
    own.closed(30.0, [30.0 + JUMP_ROUNDS * H])
    assert (own.step, own.debt) == (30.0, 2 * JUMP_ROUNDS)
    assert own.nominal_round == 1
    own.closed(32.0, [33.0 + JUMP_ROUNDS * H])
    assert own.step == 33.0 + JUMP_ROUNDS * H


def test_lengths_of_rounds_vary_by_a_quarter_and_are_h_on_the_average() -> None:
    quotas = varied_quotas("a", 400)
    assert (min(quotas), max(quotas)) == (H - VARIED * H, H + VARIED * H)
    assert sum(quotas) / len(quotas) == pytest.approx(H, rel=0.03)
    assert quotas[:50] == varied_quotas("a", 50)


def test_peers_that_closed_together_drift_apart() -> None:
    """What was drawn longer or shorter is no debt: else they would close together for ever."""
    one, other = varied_quotas("a", 400), varied_quotas("b", 400)
    apart = [abs(sum(one[:n]) - sum(other[:n])) for n in range(400)]
    assert max(apart) > 2 * H


def test_a_slow_peer_counts_more_for_each_step() -> None:
    plan = rounds().plan(5.0)
    assert (plan.quota, plan.stride) == (5, 4.0)


@pytest.mark.parametrize("owed", [1.0, 5.0, 20.0, 8 / 3, 80.0])
def test_peers_of_all_speeds_come_to_the_same_nominal_steps(owed: float) -> None:
    own = rounds(10**9)
    for number in range(1, 50):
        plan = own.plan(owed)
        own.closed(plan.start_step + plan.stride * plan.quota, [])
        assert number * H - plan.stride < own.step <= number * H + 1e-6


def test_the_stride_is_that_of_what_is_owed_and_not_of_the_whole_steps_in_the_quota() -> None:
    own = rounds()
    own.closed(1.25 * H, [])
    plan = own.plan(8 / 3)
    assert plan.quota == 2
    assert plan.stride == pytest.approx(7.5)


def test_what_a_round_trains_beyond_its_quota_is_taken_off_later_ones() -> None:
    own = rounds()
    own.closed(1.7 * H, [])
    assert own.plan(H).quota == 10  # half a round at least, so 0.2 are still owed
    own.closed(2.2 * H, [])
    assert own.plan(H).quota == 16
    own.closed(3.0 * H, [])
    assert own.plan(H).quota == H


def test_on_a_line_that_is_too_thin_the_debt_is_bounded() -> None:
    own = rounds()
    own.closed(30.0 * H, [])
    halves = 0
    while own.plan(H).quota < H:
        halves += 1
        own.closed(own.step + H / 2, [])
    assert halves == 2 * JUMP_ROUNDS


@pytest.mark.parametrize("seed", range(10))
def test_one_average_per_round_of_nominal_steps_while_exchanges_are_shorter(seed: int) -> None:
    """Each round lasts for its quota, and as long as its exchange, a random one."""
    chance = random.Random(seed)
    lengths = [chance.uniform(0.3, 1.4) for _ in range(200)]
    own = rounds(10**9)
    scale = 0.8 * len(lengths) / sum(lengths)  # 0.8 of a round on the average
    for length in lengths:
        plan = own.plan(H)
        own.closed(plan.start_step + max(plan.quota, length * scale * H), [])
    assert own.step <= H * (len(lengths) + JUMP_ROUNDS + 1)


def test_a_peer_that_is_far_behind_jumps_and_one_that_is_near_does_not() -> None:
    near, far = rounds(), rounds()
    middle = H + JUMP_ROUNDS * H
    assert not near.would_jump(H, [0.0, middle, 9999.0])
    assert near.would_jump(H - 1, [0.0, middle, 9999.0])
    near.closed(H, [0.0, middle, 9999.0])
    assert near.step == H
    far.closed(H, [0.0, middle + 1, 9999.0])
    assert far.step == middle + 1
    assert far.plan(H).start_step == middle + 1


def test_what_a_single_peer_says_moves_nothing() -> None:
    own = rounds()
    own.closed(H, [H, H, 900.0])
    assert own.step == H


def test_a_newcomer_begins_where_the_others_are_and_not_beyond_the_end() -> None:
    own = rounds(total=100)
    own.enter([60.0, 61.0, 5000.0])
    assert own.step == 61.0
    own.enter([40.0])
    assert own.step == 61.0
    own.enter([5000.0])
    assert own.is_over


@pytest.mark.parametrize(("step", "quota"), [(76.0, 24), (60.0, 20), (99.5, 1)])
def test_the_last_round_ends_with_the_run(step: float, quota: int) -> None:
    own = rounds(total=100, step=step)
    plan = own.plan(H)
    assert plan.quota == quota
    own.closed(plan.start_step + plan.quota, [])
    assert own.is_over == (step > 60)


def test_after_the_end_rounds_have_no_steps() -> None:
    own = rounds(total=100, step=100.0)
    assert own.is_over
    assert (own.plan(H).quota, own.plan(H).start_step) == (0, 100.0)


@pytest.mark.parametrize(
    ("now", "later", "first", "end"),
    [(100, 160, 95.0, 160.0), (100, 160, 100.0, 160.0), (160, 100, 95.0, 100.0)],
)
def test_the_end_is_the_one_in_force_at_each_step(
    now: int, later: int, first: float, end: float
) -> None:
    own = OwnRounds("a", H, lambda step: now if step < 96 else later, 0, first, varied=0.0)
    for _ in range(20):
        if own.is_over:
            break
        plan = own.plan(H)
        own.closed(plan.start_step + plan.quota * plan.stride, [])
    assert (own.step, own.plan(H).quota) == (end, 0)


# --- patience -------------------------------------------------------------------------------------
def test_half_of_the_slack_is_waited() -> None:
    patience = Patience()
    assert patience.for_fresh_s(10.0) == 5.0
    patience.exchanged(0.0, 4.0, 10.0)
    assert patience.for_fresh_s(10.0) == 3.0


def test_without_slack_savings_are_spent_in_a_lump() -> None:
    patience, waits = Patience(), []
    for _ in range(30):
        wait_s = patience.for_fresh_s(10.0)
        waits.append(wait_s)
        patience.exchanged(wait_s, 20.0, 10.0)
    assert set(waits[1:3]) == {0.0}
    spent = [wait_s for wait_s in waits[1:] if wait_s]
    assert min(spent) >= LUMP_SHARE * 20.0
    assert sum(waits[1:]) <= SAVED_SHARE * 20.0 * 30 + 1e-9
