"""What is far from all that was seen is not taken, and what is taken pulls within bounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.plausible import (
    BOUND,
    CLIP,
    FIRST,
    KEPT_AVERAGES,
    MANY,
    ODD_ONES,
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


@given(st.lists(usual, min_size=FIRST, max_size=40), st.floats(2 * BOUND.largest))
def test_what_is_far_beyond_all_is_not_taken(before, far):
    plausibility = seen(before)
    assert plausibility.share("liar", far, math.inf) is None


@pytest.mark.parametrize("distance", [math.nan, math.inf])
def test_what_is_no_number_is_never_taken(distance):
    assert Plausibility().share("liar", distance, math.inf) is None


@given(st.lists(usual, min_size=KEPT_AVERAGES, max_size=40), st.lists(any_float, max_size=60))
def test_one_that_is_every_second_partner_does_not_widen_the_bound_without_end(before, lies):
    """What it says counts only within the bound, and honest distances stand beside it."""
    plausibility = seen(before)
    for lie in lies:
        plausibility.share("liar", lie, 0.0)
        plausibility.share("b", 1.0, 0.0)
    assert plausibility.bound(0.0) <= 2.0 * BOUND.largest * BOUND.least


@given(st.lists(usual, min_size=FIRST, max_size=40), st.floats(0.0, 1e9))
def test_no_vector_pulls_further_than_a_few_times_the_usual_way(before, distance):
    plausibility = seen(before)
    share = plausibility.share("b", distance, 0.0)
    if share is not None:
        assert 0 < share <= 1
        assert share * distance <= CLIP.largest * 2.0 * (1 + 1e-9)


def test_before_enough_was_seen_the_scale_is_the_bound():
    plausibility = Plausibility()
    assert plausibility.share("b", 1.5, 1.0) is None
    assert [plausibility.share("b", 0.9, 1.0) for _ in range(FIRST)] == [1.0] * FIRST
    assert plausibility.share("b", 1.1, 1.0) == 1.0


def test_before_enough_was_seen_what_is_beyond_the_expected_counts_less():
    plausibility = Plausibility()
    share = plausibility.share("liar", 100.0, 1000.0, expected=1.0)
    assert share == pytest.approx(CLIP.largest / 100)
    assert plausibility.share("b", 1.0, 1000.0, expected=1.0) == 1.0


def test_what_was_clipped_does_not_widen_what_is_usual():
    plausibility = Plausibility()
    for _ in range(FIRST):
        plausibility.share("liar", 1e6, math.inf, expected=1.0)
    assert plausibility.bound(0.0) <= BOUND.largest * CLIP.largest
    plausibility = seen([1.0] * KEPT_AVERAGES)
    for _ in range(KEPT_AVERAGES // 2 - 1):
        assert plausibility.share("liar", BOUND.least, 0.0) == CLIP.least / BOUND.least
    assert plausibility.bound(0.0) <= BOUND.least


def test_honest_distances_that_scatter_are_clipped_later():
    steady, wild = seen([1.0] * KEPT_AVERAGES), seen([0.8, 1.0, 1.25] * KEPT_AVERAGES)
    assert steady.share("b", 1.4, 0.0) == pytest.approx(CLIP.least / 1.4)
    assert wild.share("b", 1.4, 0.0) == 1.0


def test_a_peer_that_finds_all_others_implausible_is_itself_elsewhere():
    plausibility = seen([1.0] * KEPT_AVERAGES)
    for _ in range(ODD_ONES):
        assert plausibility.share("liar", 50.0, 100.0) is None
    for name in ("b", "c"):
        assert plausibility.share(name, 50.0, 100.0) is None
    assert plausibility.share("d", 50.0, 100.0) == 1.0


def test_two_that_were_parted_come_together_again():
    plausibility = seen([1.0] * KEPT_AVERAGES)
    taken = [plausibility.share("b", 50.0, 100.0) for _ in range(2 * (ODD_ONES + 1))]
    assert taken == 2 * [*([None] * ODD_ONES), pytest.approx(CLIP.least / 50)]


def test_one_among_others_is_let_through_now_and_then_within_the_scale():
    plausibility = seen([1.0] * KEPT_AVERAGES)

    def told(distance: float) -> list[float | None]:
        shares = []
        for _ in range(ODD_ONES + 1):
            assert plausibility.share("b", 1.0, 100.0) == 1.0
            shares.append(plausibility.share("far", distance, 100.0))
        return shares

    assert told(101.0) == [None] * (ODD_ONES + 1)
    for _ in range(2):
        assert told(99.0) == [pytest.approx(CLIP.least / 99), *([None] * ODD_ONES)]


def test_each_sender_has_one_voice():
    plausibility = Plausibility()
    for sender in [*"bc" * FIRST, *["near"] * (KEPT_AVERAGES - 2 * FIRST)]:
        plausibility.share(sender, 0.5 if sender == "near" else 1.0, math.inf)
    assert plausibility.bound(0.0) >= BOUND.least


def test_what_moves_nobody_does_not_keep_the_others_from_coming_back():
    plausibility = seen([1.0] * MANY)
    for number in range(10 * KEPT_AVERAGES):
        plausibility.trained(STEPS)
        assert plausibility.share(f"echo {number % 2}", 0.0, 0.0) == 1.0
    assert plausibility.share("b", BOUND.least * BOUND.largest, 0.0, least=1.0) is not None


def test_what_we_have_moved_ourselves_is_the_least_that_counts_as_usual():
    plausibility = Plausibility()
    for _ in range(KEPT_AVERAGES):
        plausibility.share("echo", 0.0, math.inf, expected=2.0, least=1.0)
    assert plausibility.bound(0.0, least=1.0) >= BOUND.least
    for near in (0.5, 0.25, 0.1):
        for _ in range(KEPT_AVERAGES):
            plausibility.share("near", near, math.inf)
    assert plausibility.share("b", 4.0, 0.0, least=1.0) == pytest.approx(CLIP.least / 4)


def test_what_takes_our_place_pulls_as_far_as_what_counts_half():
    assert seen([1.0] * KEPT_AVERAGES).share("b", 1.0, 0.0, replaces_ours=True) == CLIP.least / 2
    assert seen([1.0] * KEPT_AVERAGES).share("b", CLIP.least / 2, 0.0, replaces_ours=True) == 1.0
    assert Plausibility().share("b", 8.0, 10.0, replaces_ours=True) == 5 / 8


def test_what_takes_the_place_of_another_counts_once():
    seen = Plausibility()
    for again in (False, True, True, True):
        assert seen.share("b", 0.2, scale=math.inf, instead=again) == 1.0
    assert not seen.has_seen_enough
    assert seen.share("b", 1.1, scale=math.inf) == 1.0


def test_peers_that_draw_together_for_good_do_not_narrow_the_bound():
    plausibility = seen([1.0] * FIRST)
    for _ in range(KEPT_AVERAGES):
        assert plausibility.share("b", 0.0, math.inf, remember=False) == 1.0
    assert plausibility.share("b", 1.0, math.inf) == 1.0


def test_equal_vectors_are_usual_too():
    plausibility = seen([0.0] * KEPT_AVERAGES)
    assert plausibility.share("b", 0.0, 0.0) == 1.0
    assert plausibility.share("liar", 1.0, 1.0) is None


@given(st.lists(st.floats(0, 10), min_size=3, max_size=9), st.lists(any_float, max_size=4))
def test_a_minority_cannot_pull_a_mean_far(honest, lies):
    lies = [abs(lie) for lie in lies[: (len(honest) - 1) // 2]]
    lengths = [*honest, *lies]
    for length, share in zip(lengths, clipped_shares(lengths), strict=True):
        if math.isfinite(length):
            assert share * length <= CLIP.largest * max(honest) * (1 + 1e-9)
        else:
            assert share == 0.0


def test_of_two_the_shorter_is_the_measure():
    assert clipped_shares([1.0, 1.4]) == [1.0, 1.0]
    assert clipped_shares([1.0, 100.0]) == [1.0, CLIP.largest / 100]
    assert clipped_shares([0.0, 0.0]) == [1.0, 1.0]


STEPS = 4
"""Of each of two peers, usually."""


def after_steps(plausibility: Plausibility, sender: str, distance: float, *steps: int):
    """The share of a sender after so many steps of ours, and of theirs."""
    ours, theirs = steps or (STEPS, STEPS)
    plausibility.trained(ours)
    return plausibility.share(sender, distance, math.inf, their_steps=theirs)


def seen_after_steps(num: int = KEPT_AVERAGES) -> Plausibility:
    plausibility = Plausibility()
    for _ in range(num):
        after_steps(plausibility, "b", 1.0)
    return plausibility


@given(times=st.floats(1.0, 100.0), ours=st.booleans())
def test_after_many_steps_a_replica_may_be_far(times, ours):
    steps = math.ceil(2 * STEPS * times)
    both = (steps, 0) if ours else (0, steps)
    widened = min(BOUND.largest, steps / (2 * STEPS))
    far = 1.001 * widened * BOUND.largest
    assert after_steps(seen_after_steps(), "b", far, *both) is None
    taken = after_steps(seen_after_steps(), "b", widened * BOUND.least, *both)
    assert taken == pytest.approx(CLIP.least / BOUND.least / (1.0 if ours else widened))


def test_what_is_far_after_many_steps_does_not_make_that_usual():
    plausibility = seen_after_steps()
    for _ in range(KEPT_AVERAGES // 2 - 1):
        after_steps(plausibility, "b", 20.0, STEPS, 50 * STEPS)
    assert plausibility.bound(0.0) <= BOUND.least
    assert after_steps(plausibility, "liar", 20.0) is None


def test_one_that_is_always_our_partner_does_not_keep_the_others_from_coming_back():
    """It alone moves us, so the others may be further away; what it may do does not grow."""
    plausibility = seen_after_steps()
    for _ in range(KEPT_AVERAGES // 2 - 1):
        after_steps(plausibility, "c", 1.0)
    assert after_steps(plausibility, "c", 20.0) is None
    assert after_steps(plausibility, "b", 20.0) is not None


def test_two_that_are_a_little_too_far_apart_average_again_in_the_next_round():
    plausibility = seen_after_steps()
    far = 1.06 * plausibility.bound(0.0)
    assert after_steps(plausibility, "b", far) is None
    assert after_steps(plausibility, "b", far) is not None
