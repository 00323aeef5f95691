"""Asking again: sooner or later by what happened, and nothing is remembered for ever."""

from protocol.membership.book import REDIALS, BackOff


def pauses() -> BackOff:
    return BackOff(REDIALS.first_s, REDIALS.most_s)


def waits_s(back_off: BackOff, peer: str, now_s: float) -> float:
    """From a failure now until it may be asked again."""
    back_off.failed(peer, now_s)
    later_s = now_s
    while not back_off.is_due(peer, later_s):
        later_s += REDIALS.first_s
    return later_s - now_s


def test_each_failure_is_followed_by_a_longer_pause_until_an_answer():
    back_off, now_s, waited_s = pauses(), 0.0, []
    for _ in range(9):
        waited_s.append(waits_s(back_off, "a", now_s))
        now_s += REDIALS.most_s
    assert waited_s == [0.5, 1, 2, 4, 8, 16, REDIALS.most_s, REDIALS.most_s, REDIALS.most_s]
    back_off.answered("a")
    assert back_off.is_due("a", now_s)
    assert waits_s(back_off, "a", now_s) == REDIALS.first_s


def test_a_pause_has_a_lower_bound_where_one_is_given():
    back_off = pauses()
    back_off.failed("a", 0.0, at_least_s=300.0)
    assert not back_off.is_due("a", 299.0)
    assert back_off.is_due("a", 300.0)
    assert waits_s(back_off, "a", 300.0) == 2 * REDIALS.first_s


def test_who_was_lost_is_asked_sooner_than_who_left():
    back_off = pauses()
    back_off.put_off("lost", 0)
    back_off.put_off("left", 0, long=True)
    back_off.put_off("left", 0)  # its link ends
    assert not back_off.is_due("lost", REDIALS.first_s / 2)
    assert back_off.is_due("lost", REDIALS.first_s)
    assert not back_off.is_due("left", REDIALS.most_s - 1)
    assert back_off.is_due("left", REDIALS.most_s)
    assert back_off.is_due("a stranger", 0)


def test_of_peers_that_are_gone_nothing_is_kept():
    back_off = pauses()
    for number in range(1000):
        back_off.failed(f"gone {number}", 0)
        back_off.put_off(f"never in the view {number}", 0)
    assert waits_s(back_off, "known", 1000) == REDIALS.first_s
    assert len(back_off._kept) == 1
