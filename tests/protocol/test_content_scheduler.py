"""Which piece is asked of whom next."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.content.scheduler import Request, Scheduler
from protocol.limits import MAX_ASKED, MAX_ASKED_PER_SOURCE

NUM_PIECES = 12


def having(*pieces: int):
    here = np.zeros(NUM_PIECES, bool)
    here[list(pieces)] = True
    return here


EVERY = having(*range(NUM_PIECES))
NONE = having()


def came(requests: Scheduler, request: Request) -> None:
    """A piece is here, and its keeper says so."""
    requests._here[request.item] = True
    requests.came(request)


def asked(requests: Scheduler) -> list[int]:
    return [request.item for request in requests.next_requests()]


def test_what_is_needed_first_goes_first_and_then_the_rarest() -> None:
    requests = Scheduler("me", having(3))
    for number in range(4):
        requests.holds(f"p{number}", EVERY if number < 2 else having(1, 2, 7))
    requests.want((7, 3, 1), (2, 5, 9), NONE)
    pieces = asked(requests)
    assert pieces[:2] == [7, 1]
    assert sorted(pieces[2:4]) == [5, 9]
    assert pieces[4:] == [2]
    assert asked(requests) == []


def test_holders_share_the_work_and_none_is_asked_for_more_than_its_bound() -> None:
    requests = Scheduler("me", having())
    requests.holds("a", EVERY)
    requests.holds("b", EVERY)
    requests.want(range(NUM_PIECES), (), NONE)
    sources = [request.source for request in requests.next_requests()]
    assert sorted(sources) == sorted(["a", "b"] * MAX_ASKED_PER_SOURCE)
    many = Scheduler("me", having())
    for number in range(20):
        many.holds(f"p{number}", EVERY)
    many.want(range(NUM_PIECES), (), NONE)
    assert len(many.next_requests()) == MAX_ASKED


def test_peers_that_need_the_same_ask_different_holders() -> None:
    sources = set()
    for me in "abcdefgh":
        requests = Scheduler(me, NONE)
        for number in range(4):
            requests.holds(f"p{number}", EVERY)
        requests.want((0,), (), NONE)
        sources.add(requests.next_requests()[0].source)
    assert len(sources) > 1


def test_a_piece_that_did_not_come_is_asked_of_another() -> None:
    requests = Scheduler("me", having())
    requests.holds("a", having(4))
    requests.holds("b", having(4))
    requests.want((4,), (), NONE)
    (first,) = requests.next_requests()
    requests.failed(first)
    (second,) = requests.next_requests()
    assert {first.source, second.source} == {"a", "b"}
    requests.failed(second)
    assert asked(requests) == []  # nobody has it
    requests.holds("a", having(4))
    again = requests.next_requests()
    assert again == [Request("a", 4)]
    came(requests, again[0])
    assert requests._here[4]
    requests._here[4] = False
    assert [request.item for request in requests.next_requests()] == [4]


def test_what_is_waited_for_is_asked_of_two_and_taken_once() -> None:
    requests = Scheduler("me", having())
    requests.holds("a", EVERY)
    requests.holds("b", EVERY)
    requests.want((1,), (), NONE)
    assert asked(requests) == [1]
    requests.wait_for((1,))
    (other,) = requests.next_requests()
    assert other.item == 1
    assert asked(requests) == []
    came(requests, other)
    assert requests._here[1]
    requests.failed(Request("b" if other.source == "a" else "a", 1))
    assert requests._here[1]


def test_no_more_are_asked_for_than_the_line_takes() -> None:
    requests = Scheduler("me", having())
    for number in range(4):
        requests.holds(f"p{number}", EVERY)
    requests.want(range(NUM_PIECES), (), NONE)
    first = requests.next_requests(1)
    assert [request.item for request in first] == [0]
    assert requests.next_requests(1) == []
    assert [request.item for request in requests.next_requests(3)] == [1, 2]


def test_what_is_waited_for_is_asked_of_another_once_it_is_overtaken() -> None:
    requests = Scheduler("me", having())
    requests.holds("slow", having(0))
    requests.wait_for((0,))
    assert requests.next_requests() == [Request("slow", 0)]
    requests.holds("a", EVERY)
    requests.want(range(1, NUM_PIECES), (), NONE)
    for count in range(MAX_ASKED):
        piece = 1 + count
        assert Request("a", 0) not in requests.next_requests(3), count
        came(requests, Request("a", piece))
    assert requests.next_requests(3)[0] == Request("a", 0)
    assert Request("a", 0) not in requests.next_requests(9)


def test_what_is_kept_for_others_goes_last_and_alone() -> None:
    requests = Scheduler("me", having())
    requests.holds("a", EVERY)
    requests.holds("b", having(0, 1, 2))
    requests.want((5,), (), having(0, 1, 8, 9))
    pieces = asked(requests)
    assert pieces[0] == 5
    assert len(pieces[1:]) == 1
    came(requests, Request("a", pieces[1]))
    assert {pieces[1], *asked(requests)} == {8, 9}


def calls_for_nothing(num_missing: int) -> int:
    """How many calls it takes to find that a source has nothing that is missing."""
    requests = Scheduler("me", np.zeros(num_missing, bool))
    requests.holds("other", np.ones(num_missing, bool))
    requests.holds("idle", np.zeros(num_missing, bool))
    requests.wait_for(range(num_missing))
    count = 0

    def counted(_frame: object, event: str, _of: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        found = requests.next_requests(of="idle")
    finally:
        sys.setprofile(before)
    assert found == []
    return count


def test_a_source_that_has_nothing_costs_next_to_nothing_however_much_is_missing() -> None:
    assert calls_for_nothing(2000) < 200


def test_a_peer_that_is_gone_counts_for_no_copy() -> None:
    requests = Scheduler("me", having())
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
    requests = Scheduler("me", having())
    requests.want((3, 1), range(NUM_PIECES), EVERY)
    open_: list[Request] = []
    for turn in range(400):
        for name in names:
            if turn % 7 == 0:
                requests.holds(name, having(*holds[name]))
        for request in requests.next_requests():
            assert request.item in holds[request.source]
            assert not requests._here[request.item]
            open_.append(request)
        assert len(open_) <= MAX_ASKED
        if not open_:
            continue
        ended = open_.pop(data.draw(st.integers(0, len(open_) - 1)))
        if turn < 100 and data.draw(st.booleans()):
            requests.failed(ended)
        else:
            came(requests, ended)
    assert all(requests._here[piece] for piece in range(NUM_PIECES))
