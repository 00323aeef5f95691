"""A partner's average that raises our loss is refused, but nobody for ever."""

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from protocol.gossip.helping import (
    LEAST_TOKENS,
    LEAST_VOICES,
    MOST_BLOCKS,
    TRIED_SHARE,
    Helpfulness,
    trial_blocks,
)
from protocol.plausible import KEPT_AVERAGES, ODD_ONES

HONEST = [("a", 0.01), ("b", 0.004), ("c", -0.002), ("d", 0.006)]
gains = st.floats(-1.0, 1.0) | st.sampled_from([math.nan, math.inf, -math.inf])


def judge(seen: Sequence[tuple[str, float]]) -> Helpfulness:
    helpfulness = Helpfulness()
    for peer_id, gain in seen:
        helpfulness.takes(peer_id, gain)
    return helpfulness


def test_what_raises_the_loss_and_helps_less_than_others_is_refused():
    assert not judge(HONEST).takes("liar", -0.1)
    assert not judge(HONEST).takes("liar", math.nan)


def test_what_helps_is_taken_however_much_others_help():
    assert judge([(peer, 10 * gain) for peer, gain in HONEST]).takes("slow", 0.0)


def test_where_all_averages_raise_the_loss_at_most_half_of_them_is_refused():
    helpfulness = judge([(peer, -0.1) for peer in "abcd"])
    assert helpfulness.takes("e", -0.1)
    assert not helpfulness.takes("f", -0.11)


@given(st.lists(gains, max_size=40))
def test_too_few_voices_refuse_nobody(told):
    helpfulness = Helpfulness()
    names = [f"peer {number % (LEAST_VOICES - 1)}" for number in range(len(told))]
    assert all(helpfulness.takes(name, gain) for name, gain in zip(names, told, strict=True))


def test_one_that_comes_often_has_one_voice():
    helpfulness = judge([*HONEST, *[("liar", -1.0)] * (KEPT_AVERAGES - len(HONEST))])
    assert not helpfulness.takes("e", -0.5)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), gains), max_size=80))
def test_nobody_is_refused_more_often_in_a_row_than_a_few_times(told):
    helpfulness, refused = Helpfulness(), dict.fromkeys("abcdefgh", 0)
    for peer_id, gain in told:
        refused[peer_id] = 0 if helpfulness.takes(peer_id, gain) else refused[peer_id] + 1
        assert refused[peer_id] <= ODD_ONES


def test_a_partner_is_let_through_after_a_few_refusals_whatever_others_brought_meanwhile():
    helpfulness, taken = judge(HONEST), []
    for _ in range(2 * (ODD_ONES + 1)):
        taken.append(helpfulness.takes("liar", -0.1))
        for peer_id, gain in HONEST:
            helpfulness.takes(peer_id, gain)
    assert taken == [*[False] * ODD_ONES, True] * 2


@given(st.integers(0, 10**4), st.integers(1, 512), st.integers(64, 4096), st.integers(1, 40))
def test_trials_of_a_round_cost_a_small_share_of_its_training(steps, batch, length, fragments):
    blocks = trial_blocks(steps, batch, length, fragments)
    assert fragments * blocks <= TRIED_SHARE * steps * batch
    assert blocks <= MOST_BLOCKS
    assert blocks == 0 or blocks * length >= LEAST_TOKENS


def test_a_round_of_usual_length_affords_a_trial():
    assert trial_blocks(25, 8, 256, 1) == 4
    assert trial_blocks(50, 64, 1024, 4) == MOST_BLOCKS
    assert trial_blocks(0, 64, 1024, 1) == 0
