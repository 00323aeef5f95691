"""No microbatch's gradient counts much more than they usually do, whatever its length."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.microbatch.sizes import CLIP, KEPT_LENGTHS, GradientShares

usual = st.floats(1.0, 2.0)
FIRST = 64.0


@given(st.lists(usual, max_size=80))
def test_honest_ones_count_whole(lengths):
    shares = GradientShares(FIRST)
    assert {shares.share(length) for length in lengths} <= {1.0}
    assert shares.num_clipped == 0


@given(st.lists(st.tuples(st.booleans(), usual, st.floats(0.0, 1e38)), min_size=1, max_size=200))
def test_less_than_half_of_them_never_count_for_more_than_a_few_others(drawn):
    """Whichever come when: in every window there are more honest ones."""
    shares, honest, lies = GradientShares(FIRST), 0, 0
    for is_lie, length, lie in drawn:
        if is_lie and honest > lies + KEPT_LENGTHS // 2:
            lies += 1
            assert shares.share(lie) * lie <= CLIP * 2.0 * (1 + 1e-9)
        else:
            honest += 1
            assert shares.share(length) == 1.0


@pytest.mark.parametrize("length", [math.nan, math.inf])
def test_what_is_no_number_counts_nothing_and_is_no_scale(length):
    shares = GradientShares(FIRST)
    assert shares.share(length) == 0.0
    assert shares.bound == FIRST
    assert shares.num_clipped == 1


def test_before_the_first_the_callers_bound_holds():
    assert GradientShares(FIRST).share(4 * FIRST) == 0.25


def test_a_first_one_that_is_huge_does_not_clip_those_after_it():
    shares = GradientShares(FIRST)
    shares.share(1e30)
    assert [shares.share(1.0) for _ in range(4)] == [1.0] * 4
    assert shares.share(1e30) <= CLIP * FIRST / 1e30


def test_nothing_at_all_says_nothing_of_what_is_usual():
    shares = GradientShares(FIRST)
    assert [shares.share(0.0) for _ in range(KEPT_LENGTHS)] == [1.0] * KEPT_LENGTHS
    assert shares.bound == FIRST


def test_a_scale_that_rises_is_followed():
    shares = GradientShares(FIRST)
    for length in (1.0, 100.0):
        for _ in range(4 * KEPT_LENGTHS):
            share = shares.share(length)
    assert share == 1.0
    assert shares.bound == CLIP * 100.0
