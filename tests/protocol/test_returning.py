"""Peers that come back to a run that was down choose the newest checkpoint, without anybody."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.membership.returning import (
    ALONE_S,
    LEADER_S,
    LISTEN_S,
    RETURNING,
    THERE,
    UNREACHED_S,
    Course,
    choose_course,
)
from protocol.membership.view import BEATS, TRUSTED_AFTER_S, Member, Progress

STEPS = st.integers(1, 5)
NOW_S = 1000.0


def member(peer_id: str, step: int, state: str = RETURNING) -> Member:
    return Member(peer_id, 1, alive=True, progress=Progress(state, step=step))


@pytest.mark.parametrize("state", sorted(THERE))
@pytest.mark.parametrize("waited_s", [0.0, LISTEN_S, LEADER_S])
def test_a_run_that_goes_on_is_followed(state, waited_s):
    others = [member("a", 3, state), member("b", 10**6)]
    assert choose_course((100, "me"), others, waited_s, NOW_S) is Course.FOLLOW


def test_nobody_leads_before_links_are_made():
    assert choose_course((1, "me"), [], LISTEN_S - 0.1, NOW_S) is Course.WAIT
    assert choose_course((1, "me"), [], LISTEN_S, NOW_S) is Course.LEAD


@given(steps=st.dictionaries(st.sampled_from("abcdef"), STEPS, min_size=1))
def test_of_those_that_see_each_other_one_leads_and_it_has_the_furthest_checkpoint(steps):
    courses = {}
    for own, step in steps.items():
        others = [member(peer, theirs) for peer, theirs in steps.items() if peer != own]
        courses[own] = choose_course((step, own), others, LISTEN_S, NOW_S)
    leaders = [peer for peer, course in courses.items() if course is Course.LEAD]
    assert len(leaders) == 1
    assert steps[leaders[0]] == max(steps.values())
    assert set(courses.values()) <= {Course.LEAD, Course.WAIT}


def test_a_leader_that_never_begins_is_waited_for_no_longer():
    liar = [member("liar", 10**9)]
    assert choose_course((5, "me"), liar, LEADER_S - 1, NOW_S) is Course.WAIT
    assert choose_course((5, "me"), liar, LEADER_S, NOW_S) is Course.LEAD


def test_without_a_checkpoint_a_peer_never_leads():
    assert choose_course(None, [], 10 * LEADER_S, NOW_S) is Course.WAIT
    assert choose_course(None, [member("a", 1)], 10 * LEADER_S, NOW_S) is Course.WAIT
    assert choose_course(None, [member("a", 1, "training")], 0.0, NOW_S) is Course.FOLLOW


def test_where_no_remembered_peer_answers_it_is_waited_for_longer():
    wait = {"unreached": True}
    assert choose_course((5, "me"), [], UNREACHED_S - 1, NOW_S, **wait) is Course.WAIT
    assert choose_course((5, "me"), [], UNREACHED_S, NOW_S, **wait) is Course.LEAD
    assert choose_course((5, "me"), [], LISTEN_S, NOW_S) is Course.LEAD


def test_a_founder_without_a_checkpoint_leads_where_nobody_has_one():
    empty = [member("z", 0)]
    assert choose_course((0, "me"), empty, LISTEN_S, NOW_S) is Course.LEAD
    assert choose_course((0, "me"), [*empty, member("a", 1)], LISTEN_S, NOW_S) is Course.WAIT
    assert choose_course(None, empty, LISTEN_S, NOW_S) is Course.WAIT


def test_newcomers_that_download_do_not_count():
    others = [member("a", 10**6, "downloading")]
    assert choose_course((5, "me"), others, LISTEN_S, NOW_S) is Course.LEAD


def test_a_hello_that_says_it_trains_is_not_followed_before_it_has_beaten_for_a_while():
    known = Member("a", 1, beats=9, first_beat_s=NOW_S - 9, progress=Progress(RETURNING, step=1))
    newcomer = member("b", 10**6, "training")
    assert choose_course((5, "me"), [known, newcomer], LISTEN_S, NOW_S) is Course.WAIT
    assert choose_course((5, "me"), [known, newcomer], LEADER_S, NOW_S) is Course.LEAD
    beaten = replace(newcomer, beats=BEATS, first_beat_s=NOW_S - TRUSTED_AFTER_S)
    assert choose_course((5, "me"), [known, beaten], LISTEN_S, NOW_S) is Course.FOLLOW


LAG = 20.0
OLDER, NEAR = 100 - int(LAG) - 1, 100 - int(LAG)


def beside(*others: Member, waited_s: float, own: int = 100) -> Course:
    return choose_course((own, "me"), others, waited_s, NOW_S, LAG)


def test_one_that_came_back_first_with_an_older_checkpoint_is_not_followed():
    alone = member("a", OLDER, "training")
    assert beside(alone, waited_s=ALONE_S - 0.1) is Course.WAIT
    assert beside(alone, waited_s=ALONE_S) is Course.LEAD
    assert beside(alone, waited_s=LEADER_S) is Course.LEAD
    assert beside(alone, member("b", 99), waited_s=ALONE_S) is Course.LEAD
    assert beside(alone, member("b", 101), waited_s=ALONE_S) is Course.WAIT


@pytest.mark.parametrize(
    "others",
    [
        [member("a", NEAR, "training")],
        [member("a", OLDER, "paused")],
        [member("a", OLDER, "finished")],
        [member("a", OLDER, "training"), member("b", OLDER, "training")],
        [member("a", OLDER, "training"), member("b", 99, "training"), member("c", 99, "training")],
    ],
    ids=["near", "paused", "finished", "two", "straggler"],
)
def test_any_other_that_is_there_is_followed(others):
    assert beside(*others, waited_s=0.0) is Course.FOLLOW
    assert beside(*others, waited_s=LEADER_S) is Course.FOLLOW


def test_one_that_has_yet_to_take_the_newer_state_is_waited_for():
    others = [member("a", OLDER, "training"), member("b", 101, "training")]
    assert beside(*others, waited_s=LEADER_S - 1) is Course.WAIT
    assert beside(*others, waited_s=LEADER_S) is Course.FOLLOW


def test_stages_of_a_pipeline_never_begin_by_themselves_while_others_train():
    alone = member("a", 0, "training")
    assert choose_course((10**6, "me"), [alone], LEADER_S, NOW_S) is Course.FOLLOW
