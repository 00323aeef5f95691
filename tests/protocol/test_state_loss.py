"""A state's loss beside those that others tell."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.content.samples import LOSS_FACTOR, LOSS_FLOOR, is_worse

LOSSES = st.floats(0, 20)


@pytest.mark.parametrize(
    ("loss", "told", "worse"),
    [
        (2.7, [2.0, 2.0], False),
        (2.8, [2.0, 2.0], True),
        (2.8, [2.0, 2.1, 9.0], False),  # the middle one of three
        (2.8, [1.0, 2.1], False),  # the higher of two
        (0.1, [2.0, 2.0], False),  # a state may be better than ours
        (9.0, [2.0], False),
        (9.0, [], False),
        (math.nan, [2.0, 2.0], True),
        (math.inf, [2.0, 2.0], True),
        (math.nan, [2.0], False),
    ],
)
def test_a_state_is_worse_when_its_loss_is_far_above_the_middle_of_what_two_others_tell(
    loss, told, worse
):
    assert is_worse(loss, told) == worse


@given(st.lists(LOSSES, min_size=3, max_size=9), LOSSES, st.integers(0, 8))
def test_one_who_lies_about_its_loss_moves_the_bound_to_that_of_another_at_most(told, lie, place):
    """Whatever one says, a state as good as the best that is told otherwise is never worse."""
    lied = list(told)
    lied[place % len(told)] = lie
    others = [loss for index, loss in enumerate(told) if index != place % len(told)]
    assert not is_worse(min(others), lied)
    assert is_worse(LOSS_FACTOR * max(others) + LOSS_FLOOR + 0.01, lied)
