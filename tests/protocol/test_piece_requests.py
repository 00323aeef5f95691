"""Which piece is asked of whom next."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.content.requests import MAX_KEPT_AT_ONCE, PieceRequests, Request
from protocol.limits import MAX_AT_ONCE, MAX_PER_PEER

NUM_PIECES = 12


def having(*pieces: int):
    here = np.zeros(NUM_PIECES, bool)
    here[list(pieces)] = True
    return here


EVERY = having(*range(NUM_PIECES))
NONE = having()


def asked(requests: PieceRequests) -> list[int]:
    return [request.piece for request in requests.next_requests()]


def test_what_is_needed_first_goes_first_and_then_the_rarest() -> None:
    requests = PieceRequests("me", having(3))
    for number in range(4):
        requests.holds(f"p{number}", EVERY if number < 2 else having(1, 2, 7))
    requests.want((7, 3, 1), (2, 5, 9), NONE)
    pieces = asked(requests)
    assert pieces[:2] == [7, 1]
    assert sorted(pieces[2:4]) == [5, 9]
    assert pieces[4:] == [2]
    assert asked(requests) == []


def test_holders_share_the_work_and_none_is_asked_for_more_than_its_bound() -> None:
    requests = PieceRequests("me", NONE)
    requests.holds("a", EVERY)
    requests.holds("b", EVERY)
    requests.want(range(NUM_PIECES), (), NONE)
    sources = [request.peer_id for request in requests.next_requests()]
    assert sorted(sources) == sorted(["a", "b"] * MAX_PER_PEER)
    many = PieceRequests("me", NONE)
    for number in range(20):
        many.holds(f"p{number}", EVERY)
    many.want(range(NUM_PIECES), (), NONE)
    assert len(many.next_requests()) == MAX_AT_ONCE


def test_peers_that_need_the_same_ask_different_holders() -> None:
    sources = set()
    for me in "abcdefgh":
        requests = PieceRequests(me, NONE)
        for number in range(4):
            requests.holds(f"p{number}", EVERY)
        requests.want((0,), (), NONE)
        sources.add(requests.next_requests()[0].peer_id)
    assert len(sources) > 1


def test_a_piece_that_did_not_come_is_asked_of_another() -> None:
    requests = PieceRequests("me", NONE)
    requests.holds("a", having(4))
    requests.holds("b", having(4))
    requests.want((4,), (), NONE)
    (first,) = requests.next_requests()
    requests.failed(first)
    (second,) = requests.next_requests()
    assert {first.peer_id, second.peer_id} == {"a", "b"}
    requests.failed(second)
    assert asked(requests) == []  # nobody has it
    requests.holds("a", having(4))
    again = requests.next_requests()
    assert again == [Request("a", 4)]
    requests.came(again[0])
    assert requests.is_here(4)
    requests.dropped(4)
    assert [request.piece for request in requests.next_requests()] == [4]


def test_what_is_waited_for_is_asked_of_two_and_taken_once() -> None:
    requests = PieceRequests("me", NONE)
    requests.holds("a", EVERY)
    requests.holds("b", EVERY)
    requests.want((1,), (), NONE)
    assert asked(requests) == [1]
    requests.wait_for((1,))
    (other,) = requests.next_requests()
    assert other.piece == 1
    assert asked(requests) == []
    requests.came(other)
    assert requests.is_here(1)
    requests.failed(Request("b" if other.peer_id == "a" else "a", 1))
    assert requests.is_here(1)


def test_no_more_are_asked_for_than_the_line_takes() -> None:
    requests = PieceRequests("me", NONE)
    for number in range(4):
        requests.holds(f"p{number}", EVERY)
    requests.want(range(NUM_PIECES), (), NONE)
    first = requests.next_requests(1)
    assert [request.piece for request in first] == [0]
    assert requests.next_requests(1) == []
    assert [request.piece for request in requests.next_requests(3)] == [1, 2]


def test_what_is_waited_for_is_asked_of_another_once_it_is_overtaken() -> None:
    requests = PieceRequests("me", NONE)
    requests.holds("slow", having(0))
    requests.wait_for((0,))
    assert requests.next_requests() == [Request("slow", 0)]
    requests.holds("a", EVERY)
    requests.want(range(1, NUM_PIECES), (), NONE)
    for count in range(MAX_AT_ONCE):
        piece = 1 + count
        assert Request("a", 0) not in requests.next_requests(3), count
        requests.came(Request("a", piece))
    assert requests.next_requests(3)[0] == Request("a", 0)
    assert Request("a", 0) not in requests.next_requests(9)


def test_what_is_kept_for_others_goes_last_and_alone() -> None:
    requests = PieceRequests("me", NONE)
    requests.holds("a", EVERY)
    requests.holds("b", having(0, 1, 2))
    requests.want((5,), (), having(0, 1, 8, 9))
    pieces = asked(requests)
    assert pieces[0] == 5
    assert len(pieces[1:]) == MAX_KEPT_AT_ONCE
    requests.came(Request("a", pieces[1]))
    assert {pieces[1], *asked(requests)} == {8, 9}


def test_a_peer_that_is_gone_counts_for_no_copy() -> None:
    requests = PieceRequests("me", NONE)
    requests.holds("a", having(1, 2))
    requests.holds("b", having(2))
    assert requests.copies.tolist()[1:3] == [1, 2]
    requests.holds("a", having(2))
    requests.gone("b")
    assert requests.copies.tolist()[1:3] == [0, 1]


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_everything_comes_whatever_fails(data: st.DataObject) -> None:
    """Sources fail and come back; bounds hold, and nothing is asked that is here or not there."""
    names = ["a", "b", "c"]
    holds = {name: set(data.draw(st.sets(st.integers(0, NUM_PIECES - 1)))) for name in names}
    holds["a"] = set(range(NUM_PIECES))
    requests = PieceRequests("me", NONE)
    requests.want((3, 1), range(NUM_PIECES), EVERY)
    open_: list[Request] = []
    for turn in range(400):
        for name in names:
            if turn % 7 == 0:
                requests.holds(name, having(*holds[name]))
        for request in requests.next_requests():
            assert request.piece in holds[request.peer_id]
            assert not requests.is_here(request.piece)
            open_.append(request)
        assert len(open_) <= MAX_AT_ONCE
        if not open_:
            continue
        ended = open_.pop(data.draw(st.integers(0, len(open_) - 1)))
        if turn < 100 and data.draw(st.booleans()):
            requests.failed(ended)
        else:
            requests.came(ended)
    assert all(requests.is_here(piece) for piece in range(NUM_PIECES))
