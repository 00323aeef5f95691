"""Boundaries far larger than those of several are refused, and no one identity refuses another."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.microbatch.sizes import (
    AGE,
    FACTOR,
    LARGEST,
    ODD_TIMES,
    OF_ONE,
    SEVERAL,
    BoundarySizes,
    SizeVerdict,
)

USUAL, UNUSUAL, IMPOSSIBLE = SizeVerdict.USUAL, SizeVerdict.UNUSUAL, SizeVerdict.IMPOSSIBLE
HONEST = ("a", "b", "c")
SPREAD = 8.0
usual = st.floats(1.0, SPREAD)
any_size = st.floats(min_value=0.0) | st.sampled_from((1e-9, 1e-3, 1e4, LARGEST, math.nan))


def num_kept(sizes):
    """Sizes remembered, of all kinds."""
    return sum(len(of_one) for kind in sizes._kinds.values() for _, of_one in kind.voices.values())


def judge(sizes: BoundarySizes, sender: str, size: float) -> SizeVerdict:
    return sizes.judge(sender, size, stage=1, is_gradient=True)


def seen(*senders: str, size: float = 1.0) -> BoundarySizes:
    sizes = BoundarySizes()
    for sender in senders:
        assert judge(sizes, sender, size) is USUAL
    return sizes


@given(st.lists(st.tuples(st.sampled_from((*HONEST, "liar")), any_size, usual), max_size=120))
def test_whatever_one_identity_sends_and_when_no_other_is_refused(sent):
    sizes = BoundarySizes()
    for sender, lie, honest in sent:
        verdict = judge(sizes, sender, lie if sender == "liar" else honest)
        assert sender == "liar" or verdict is USUAL


@given(
    st.lists(st.tuples(st.sampled_from(HONEST), usual), max_size=40),
    st.lists(st.floats(2 * SPREAD * FACTOR, LARGEST), min_size=1, max_size=40),
)
def test_what_is_far_larger_than_those_of_several_is_never_taken(sent, lies):
    sizes = seen(*HONEST)
    for sender, size in sent:
        judge(sizes, sender, size)
    assert {judge(sizes, "liar", lie) for lie in lies} == {UNUSUAL}


@given(st.lists(any_size, min_size=1, max_size=40))
def test_a_liar_does_not_lead_the_bound_away_from_three_others(lies):
    """It begins small, or at the bound, and goes on from where it is."""
    sizes = seen(*HONEST)
    for lie in [*lies, *(1.9 * FACTOR**n for n in range(1, 4) for _ in range(OF_ONE))]:
        for sender in HONEST:
            assert judge(sizes, sender, 1.0) is USUAL
        verdict = judge(sizes, "liar", lie)
        assert verdict is not USUAL or lie <= FACTOR


@pytest.mark.parametrize("size", [math.nan, math.inf, 2 * LARGEST])
def test_what_no_honest_peer_sends_is_impossible_from_the_first_on(size):
    assert judge(BoundarySizes(), "liar", size) is IMPOSSIBLE


def test_a_newcomer_is_judged_where_several_others_were_heard():
    far = 2 * FACTOR
    assert judge(seen("a"), "new", far) is USUAL
    assert SEVERAL == 2
    assert judge(seen("a", "b"), "new", far) is UNUSUAL


def test_one_peer_alone_is_held_against_what_it_sent_itself():
    sizes = seen("a")
    assert judge(sizes, "a", 2 * FACTOR) is UNUSUAL
    assert judge(sizes, "a", FACTOR / 2) is USUAL


@pytest.mark.parametrize("ratio", [0.9, 1.1])
def test_a_scale_that_moves_with_the_training_is_followed(ratio):
    sizes, size = BoundarySizes(), 1.0
    while 1e-6 < size < LARGEST / 2:
        for sender in HONEST:
            assert judge(sizes, sender, size) is USUAL
        size *= ratio


@pytest.mark.parametrize("senders", [("a",), ("a", "b"), HONEST])
def test_a_scale_that_has_jumped_for_most_is_taken_after_a_few_refusals(senders):
    sizes = seen(*senders)
    verdicts = [judge(sizes, senders[i % len(senders)], 1e4) for i in range(3 * ODD_TIMES)]
    assert verdicts.index(USUAL) == ODD_TIMES
    assert set(verdicts[ODD_TIMES:]) == {USUAL}


def test_who_is_not_most_has_nothing_forgotten_by_insisting():
    sizes = seen(*HONEST)
    assert {judge(sizes, "a", 1e4) for _ in range(20 * ODD_TIMES)} == {UNUSUAL}
    strangers = [judge(sizes, f"new {i}", 1e4) for i in range(20 * ODD_TIMES)]
    assert set(strangers) == {UNUSUAL}


def test_directions_and_stages_have_scales_of_their_own():
    sizes = seen(*HONEST)
    for stage, is_gradient in ((1, False), (2, True), (None, True)):
        large = sizes.judge("d", 1e4, stage=stage, is_gradient=is_gradient)
        assert large is USUAL
    assert judge(sizes, "d", 1e4) is UNUSUAL


def test_nothing_at_all_is_no_scale():
    sizes = seen(*HONEST, size=0.0)
    assert num_kept(sizes) == 0
    assert judge(sizes, "a", 1.0) is USUAL


def test_a_voice_that_is_long_silent_is_forgotten():
    sizes = seen("gone 1", "gone 2", size=1.0)
    for _ in range(AGE + 1):
        assert judge(sizes, "a", 10.0) is USUAL
    assert num_kept(sizes) == OF_ONE


@settings(max_examples=20)
@given(st.lists(st.integers(0, 300), max_size=400))
def test_what_is_kept_is_bounded(senders):
    sizes = BoundarySizes()
    for sender in [*senders, *range(2 * AGE)]:
        judge(sizes, str(sender), 1.0)
    assert num_kept(sizes) <= (AGE + 1) * OF_ONE
