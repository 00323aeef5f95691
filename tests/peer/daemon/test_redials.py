"""Dialling again: sooner or later by what happened, and nothing is remembered for ever."""

from peer.daemon.redials import REDIAL_FIRST_S, REDIAL_MAX_S, Redials

ATTEMPT_S = 10.0


def waits_s(redials: Redials, peer: str, now_s: float) -> float:
    """From an attempt now until the next one may be made."""
    redials.dialled(peer, now_s)
    later_s = now_s
    while not redials.is_due(peer, later_s):
        later_s += REDIAL_FIRST_S
    return later_s - now_s


def test_each_attempt_waits_longer_until_one_succeeds():
    redials, now_s, waited_s = Redials(ATTEMPT_S), 0.0, []
    for _ in range(9):
        waited_s.append(waits_s(redials, "a", now_s) - ATTEMPT_S)
        now_s += 100
    assert waited_s == [0.5, 1, 2, 4, 8, 16, REDIAL_MAX_S, REDIAL_MAX_S, REDIAL_MAX_S]
    redials.linked("a")
    assert waits_s(redials, "a", now_s) == ATTEMPT_S + REDIAL_FIRST_S


def test_an_attempt_that_fails_at_once_is_made_again_soon():
    redials = Redials(ATTEMPT_S)
    redials.dialled("a", 0)
    redials.failed("a", 0.1)
    assert not redials.is_due("a", REDIAL_FIRST_S)
    assert redials.is_due("a", 0.1 + 2 * REDIAL_FIRST_S)
    redials.dialled("a", 100)
    redials.failed("a", 100 + ATTEMPT_S)  # it took its time: as without word of it
    assert redials.is_due("a", 100 + ATTEMPT_S + 2 * REDIAL_FIRST_S)
    assert not redials.is_due("a", 100 + ATTEMPT_S)


def test_who_was_lost_is_dialled_sooner_than_who_left():
    redials = Redials(ATTEMPT_S)
    redials.lost("lost", 0)
    redials.left("left", 0)
    assert not redials.is_due("lost", REDIAL_FIRST_S / 2)
    assert redials.is_due("lost", REDIAL_FIRST_S)
    assert not redials.is_due("left", REDIAL_MAX_S - 1)
    assert redials.is_due("left", REDIAL_MAX_S)
    assert redials.is_due("a stranger", 0)


def test_of_peers_that_are_gone_nothing_is_kept():
    redials = Redials(ATTEMPT_S)
    for number in range(1000):
        redials.dialled(f"gone {number}", 0)
        redials.lost(f"never in the view {number}", 0)
    redials.dialled("known", 0)
    redials.forget(1000, {"known"})
    assert repr(redials) == "<Redials of 1, 0 put off>"
    assert waits_s(redials, "known", 1000) == ATTEMPT_S + 2 * REDIAL_FIRST_S
