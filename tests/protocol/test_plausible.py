"""What is far from all that was seen is not taken, and what is taken pulls within bounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.plausible import (
    CLIP_FACTOR,
    FIRST,
    LARGEST_FACTOR,
    LEAST_CLIP,
    LEAST_FACTOR,
    MANY,
    ODD_ONES,
    WINDOW,
    Plausibility,
    clipped_shares,
)

usual = st.floats(0.6, 1.7)
any_float = st.floats(allow_nan=True, allow_infinity=True)


def seen(distances: list[float]) -> Plausibility:
    plausibility = Plausibility()
    for distance in distances:
        assert plausibility.share("b", distance, math.inf) is not None
    return plausibility


@given(st.lists(usual, min_size=FIRST, max_size=40), usual)
def test_honest_distances_are_taken(before, now):
    assert seen(before).share("b", now, 0.0) is not None


@given(st.lists(usual, min_size=FIRST, max_size=40), st.floats(2 * LARGEST_FACTOR))
def test_what_is_far_beyond_all_is_not_taken(before, far):
    plausibility = seen(before)
    assert plausibility.share("liar", far, math.inf) is None


@pytest.mark.parametrize("distance", [math.nan, math.inf])
def test_what_is_no_number_is_never_taken(distance):
    assert Plausibility().share("liar", distance, math.inf) is None


@given(st.lists(usual, min_size=WINDOW, max_size=40), st.lists(any_float, max_size=60))
def test_one_that_is_every_second_partner_does_not_widen_the_bound_without_end(before, lies):
    """What it says counts only within the bound, and honest distances stand beside it."""
    plausibility = seen(before)
    for lie in lies:
        plausibility.share("liar", lie, 0.0)
        plausibility.share("b", 1.0, 0.0)
    assert plausibility.bound(0.0) <= 2.0 * LARGEST_FACTOR * LEAST_FACTOR


@given(st.lists(usual, min_size=FIRST, max_size=40), st.floats(0.0, 1e9))
def test_no_vector_pulls_further_than_a_few_times_the_usual_way(before, distance):
    plausibility = seen(before)
    share = plausibility.share("b", distance, 0.0)
    if share is not None:
        assert 0 < share <= 1
        assert share * distance <= CLIP_FACTOR * 2.0 * (1 + 1e-9)


def test_before_enough_was_seen_the_scale_is_the_bound():
    plausibility = Plausibility()
    assert plausibility.share("b", 1.5, 1.0) is None
    assert [plausibility.share("b", 0.9, 1.0) for _ in range(FIRST)] == [1.0] * FIRST
    assert plausibility.share("b", 1.1, 1.0) == 1.0


def test_before_enough_was_seen_what_is_beyond_the_expected_counts_less():
    plausibility = Plausibility()
    share = plausibility.share("liar", 100.0, 1000.0, expected=1.0)
    assert share == pytest.approx(CLIP_FACTOR / 100)
    assert plausibility.share("b", 1.0, 1000.0, expected=1.0) == 1.0


def test_what_was_clipped_does_not_widen_what_is_usual():
    plausibility = Plausibility()
    for _ in range(FIRST):
        plausibility.share("liar", 1e6, math.inf, expected=1.0)
    assert plausibility.bound(0.0) <= LARGEST_FACTOR * CLIP_FACTOR
    plausibility = seen([1.0] * WINDOW)
    for _ in range(WINDOW // 2 - 1):
        assert plausibility.share("liar", LEAST_FACTOR, 0.0) == LEAST_CLIP / LEAST_FACTOR
    assert plausibility.bound(0.0) <= LEAST_FACTOR


def test_honest_distances_that_scatter_are_clipped_later():
    steady, wild = seen([1.0] * WINDOW), seen([0.8, 1.0, 1.25] * WINDOW)
    assert steady.share("b", 1.4, 0.0) == pytest.approx(LEAST_CLIP / 1.4)
    assert wild.share("b", 1.4, 0.0) == 1.0


def test_a_peer_that_finds_all_others_implausible_is_itself_elsewhere():
    plausibility = seen([1.0] * WINDOW)
    for _ in range(ODD_ONES + 1):
        assert plausibility.share("liar", 50.0, 100.0) is None
    for name in ("b", "c"):
        assert plausibility.share(name, 50.0, 100.0) is None
    assert plausibility.share("d", 50.0, 100.0) == 1.0


def test_two_that_were_parted_come_together_again():
    plausibility = seen([1.0] * WINDOW)
    taken = [plausibility.share("b", 50.0, 100.0) for _ in range(MANY + 1)]
    assert taken == [*([None] * MANY), 1.0]


def test_what_takes_the_place_of_another_counts_once():
    seen = Plausibility()
    for again in (False, True, True, True):
        assert seen.share("b", 0.2, scale=math.inf, instead=again) == 1.0
    assert not seen.has_seen_enough
    assert seen.share("b", 1.1, scale=math.inf) == 1.0


def test_peers_that_draw_together_for_good_do_not_narrow_the_bound():
    plausibility = seen([1.0] * FIRST)
    for _ in range(WINDOW):
        assert plausibility.share("b", 0.0, math.inf, remember=False) == 1.0
    assert plausibility.share("b", 1.0, math.inf) == 1.0


def test_equal_vectors_are_usual_too():
    plausibility = seen([0.0] * WINDOW)
    assert plausibility.share("b", 0.0, 0.0) == 1.0
    assert plausibility.share("liar", 1.0, 1.0) is None


@given(st.lists(st.floats(0, 10), min_size=3, max_size=9), st.lists(any_float, max_size=4))
def test_a_minority_cannot_pull_a_mean_far(honest, lies):
    lies = [abs(lie) for lie in lies[: (len(honest) - 1) // 2]]
    lengths = [*honest, *lies]
    for length, share in zip(lengths, clipped_shares(lengths), strict=True):
        if math.isfinite(length):
            assert share * length <= CLIP_FACTOR * max(honest) * (1 + 1e-9)
        else:
            assert share == 0.0


def test_of_two_the_shorter_is_the_measure():
    assert clipped_shares([1.0, 1.4]) == [1.0, 1.0]
    assert clipped_shares([1.0, 100.0]) == [1.0, CLIP_FACTOR / 100]
    assert clipped_shares([0.0, 0.0]) == [1.0, 1.0]


STEPS = 4
"""Of each of two peers, usually."""


def seen_after_steps(num: int = WINDOW) -> Plausibility:
    plausibility = Plausibility()
    for _ in range(num):
        plausibility.share("b", 1.0, math.inf, own_steps=STEPS, their_steps=STEPS)
    return plausibility


@given(times=st.floats(1.0, 100.0), ours=st.booleans())
def test_after_many_steps_a_replica_may_be_far(times, ours):
    steps = math.ceil(2 * STEPS * times)
    own_steps, their_steps = (steps, 0) if ours else (0, steps)
    widened = min(LARGEST_FACTOR, steps / (2 * STEPS))

    def share(distance: float) -> float | None:
        return seen_after_steps().share(
            "b", distance, math.inf, own_steps=own_steps, their_steps=their_steps
        )

    assert share(1.001 * widened * LARGEST_FACTOR) is None
    taken = share(widened * LEAST_FACTOR)
    assert taken == pytest.approx(LEAST_CLIP / LEAST_FACTOR / (1.0 if ours else widened))


def test_what_is_far_after_many_steps_does_not_make_that_usual():
    plausibility = seen_after_steps()
    for _ in range(WINDOW // 2 - 1):
        plausibility.share("b", 20.0, math.inf, own_steps=STEPS, their_steps=50 * STEPS)
    assert plausibility.bound(0.0) <= LEAST_FACTOR
    assert plausibility.share("liar", 20.0, math.inf, own_steps=STEPS, their_steps=STEPS) is None
