"""Faults add up and fade: many in a short time make a peer ignored, and it comes back by itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.gossip.matchmaking import RESTS
from protocol.limits import HEARSAY
from protocol.membership import book
from protocol.membership.book import (
    HALF_LIFE_S,
    HIGHEST,
    IGNORED_FROM,
    MAX_SCORES,
    SLOWED_FROM,
    SLOWED_S,
    TAKEN_BACK_AT,
    WEIGHTS,
    BackOff,
    Fault,
    PeerBook,
)

RULE = Fault.BROKEN_RULE


def after_faults(count: int, every_s: float = 0.0) -> PeerBook:
    noted = PeerBook()
    for number in range(count):
        noted.note(number * every_s, "b", RULE)
    return noted


def test_a_peer_without_faults_is_heard():
    noted = PeerBook()
    assert not noted.is_ignored(0.0, "b")
    assert noted.wait_s(0.0, "b") == 0.0


def test_a_few_faults_slow_a_peer_and_many_silence_it():
    waits, ignored = [], []
    noted = PeerBook()
    for _ in range(10):
        newly = noted.note(0.0, "b", RULE)
        waits.append(noted.wait_s(0.0, "b"))
        ignored.append(newly)
    assert waits == [0.0, 0.0] + [SLOWED_S] * 8
    assert ignored == [False] * 7 + [True] + [False] * 2, "it is said once"
    assert noted.is_ignored(0.0, "b")
    assert not noted.is_ignored(0.0, "c")


def test_an_ignored_peer_is_taken_back_when_its_score_has_faded():
    noted = after_faults(8)
    faded_s = 2 * HALF_LIFE_S
    assert TAKEN_BACK_AT == 8 * 0.25
    assert noted.is_ignored(faded_s - 1.0, "b")
    assert not noted.is_ignored(faded_s, "b")
    assert not noted.is_ignored(faded_s, "b")
    assert noted.wait_s(faded_s, "b") == 0.0


def test_a_fault_now_and_then_is_forgiven():
    noted = after_faults(100, every_s=HALF_LIFE_S)
    assert noted.score(100 * HALF_LIFE_S, "b") < 2.0 < SLOWED_FROM


def test_nobody_is_ignored_for_much_longer_than_he_lies():
    noted = after_faults(10_000)
    assert noted.score(0.0, "b") == HIGHEST
    assert not noted.is_ignored(4 * HALF_LIFE_S, "b")


def test_a_bad_vector_weighs_more():
    noted = PeerBook()
    noted.note(0.0, "b", Fault.BAD_VECTOR)
    assert noted.score(0.0, "b") == WEIGHTS[Fault.BAD_VECTOR] > WEIGHTS[RULE]


def test_of_too_many_the_worst_are_kept(monkeypatch):
    monkeypatch.setattr(book, "MAX_SCORES", 4)
    noted = after_faults(9)
    for number in range(20):
        noted.note(0.0, f"peer-{number}", RULE)
    assert noted.is_ignored(0.0, "b")
    assert len(noted._conduct) == 4 < MAX_SCORES


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.sampled_from("bcd"), st.sampled_from(Fault))))
def test_a_score_is_what_its_faults_have_faded_to(faults):
    noted = PeerBook()
    faults.sort()
    end_s = 1e6
    for at_s, peer_id, fault in faults:
        noted.note(at_s, peer_id, fault)
    for peer_id in "bcd":
        most = sum(
            WEIGHTS[fault] * 0.5 ** ((end_s - at_s) / HALF_LIFE_S)
            for at_s, other, fault in faults
            if other == peer_id
        )
        assert noted.score(end_s, peer_id) <= min(HIGHEST, most) + 1e-9
        if most < IGNORED_FROM:
            assert noted.score(end_s, peer_id) == pytest.approx(most, abs=0.2)


@given(
    fault=st.sampled_from([Fault.BAD_VECTOR, Fault.IMPLAUSIBLE]),
    patience=st.lists(st.sampled_from([0.0, 1.0, 60.0, RESTS.most_s + 1]), max_size=30),
)
def test_vectors_alone_slow_a_partner_and_never_silence_it(fault, patience):
    noted, rest, now_s, waits_s = PeerBook(), BackOff(*RESTS), 0.0, [0.0]
    for more_s in (0.0, 0.0, 0.0, *patience):
        assert not noted.note(now_s, "b", fault), "it rests instead: docs/security-reference.md"
        waits_s.append(noted.wait_s(now_s, "b"))
        rest.failed("b", now_s)
        while not rest.is_due("b", now_s):
            now_s += RESTS.first_s
        now_s += more_s
    assert max(waits_s) == SLOWED_S


def test_a_name_that_is_told_anew_takes_one_place():
    noted = PeerBook()
    assert all(noted.note_name("b", "teller") for _ in range(HEARSAY.per_peer + 1))
    assert noted.note_name("b", "another")
    assert all(noted.note_name(f"c{number}", "teller") for number in range(HEARSAY.per_peer))
    assert not noted.note_name("d", "teller")
