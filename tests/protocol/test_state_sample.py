"""A sample tells a state that is unlike all others from one that is a little behind them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.content.samples import (
    BLOCK_VALUES,
    FACTOR,
    FLOOR,
    NUM_BLOCKS,
    block_starts,
    is_odd,
)

SEED = bytes(range(16))


@given(st.binary(min_size=16, max_size=16), st.integers(BLOCK_VALUES, 1 << 40))
def test_places_lie_within_the_vector_and_follow_from_the_seed(seed, size):
    starts = block_starts(seed, size)
    assert len(starts) == NUM_BLOCKS
    assert all(0 <= start <= size - BLOCK_VALUES for start in starts)
    assert starts == block_starts(seed, size)


def test_another_seed_has_other_places():
    assert not set(block_starts(SEED, 1 << 30)) & set(block_starts(SEED[::-1], 1 << 30))


def test_a_vector_without_room_for_a_block_is_refused():
    with pytest.raises(ValueError, match="255 values"):
        block_starts(SEED, BLOCK_VALUES - 1)


def test_what_all_witnesses_are_far_from_is_odd():
    assert is_odd([2.0, 2.1, 1.9], [0.1, 0.1, 0.1], length=1.0)


def test_one_lying_witness_makes_nothing_odd_and_saves_nothing_where_there_are_two_others():
    assert not is_odd([0.1, 9.0], [9.0], length=1.0)
    assert not is_odd([0.1, 0.1, 9.0], [0.1, 9.0, 9.0], length=1.0)


def test_a_state_that_is_some_rounds_behind_is_not_odd():
    assert not is_odd([0.4, 0.4], [1e-6], length=1.0)
    assert is_odd([FLOOR + 0.01, 0.6], [1e-6], length=1.0)


def test_where_witnesses_differ_much_a_state_may_too():
    assert not is_odd([3.0, 3.0], [1.0], length=1.0)
    assert is_odd([FACTOR + 0.1, 5.0], [1.0], length=1.0)


@pytest.mark.parametrize("to_witnesses", [[], [100.0]])
def test_without_two_witnesses_nothing_can_be_told(to_witnesses):
    assert not is_odd(to_witnesses, [], length=1.0)
