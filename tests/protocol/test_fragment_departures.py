"""Fragments that were sent together leave in that order."""

from protocol.diloco.keeper import Departures


def test_they_leave_in_the_order_in_which_they_were_sent():
    departures, left = Departures(), list[int]()
    for fragment in (1, 0, 2):
        departures.sent(fragment)
    while (first := departures.first) is not None:
        waiting = {0, 1, 2} - set(left)
        assert {fragment for fragment in waiting if departures.is_turn(fragment)} == {first}
        departures.left(first)
        left.append(first)
    assert left == [1, 0, 2]


def test_one_that_is_alone_or_unknown_does_not_wait():
    departures = Departures()
    assert departures.is_turn(3)
    departures.sent(3)
    assert departures.is_turn(3)
    departures.left(3)
    departures.left(3)
    assert departures.first is None


def test_one_that_leaves_before_its_turn_holds_up_nobody():
    departures = Departures()
    for fragment in (0, 1, 2):
        departures.sent(fragment)
    departures.left(1)
    assert not departures.is_turn(2)
    departures.left(0)
    assert departures.is_turn(2)
