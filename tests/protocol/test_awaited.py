"""A silent data peer holds relays up once for a while, and then ever more seldom."""

from collections.abc import Mapping

import pytest

from protocol.microbatch.iterations import FLOOR_S, MOST_LEFT_OUT, Awaited
from protocol.microbatch.relay import RelayCore
from protocol.microbatch.trainer_messages import Finish

PATIENCE_S = 600.0
USUAL_S = 10.0
TICK_S = 0.5


def lasts(awaited: Awaited, iteration: int, through_s: Mapping[str, float | None]) -> float:
    """How long an iteration lasts whose data peers are through with it then, or never."""
    now_s = 0.0
    while True:
        announced = {
            each: iteration + (at_s is not None and now_s >= at_s)
            for each, at_s in through_s.items()
        }
        if awaited.is_over(iteration, announced, tuple(through_s), now_s):
            return now_s
        now_s += TICK_S


def test_all_are_waited_for_however_much_later_they_are_within_what_is_usual():
    awaited = Awaited(PATIENCE_S)
    for iteration in range(20):
        times_s = {"a": USUAL_S, "b": 2.0 * USUAL_S, "c": 0.5 * USUAL_S}
        assert lasts(awaited, iteration, times_s) == 2 * USUAL_S
    assert lasts(awaited, 20, {"a": USUAL_S, "b": 6 * USUAL_S}) == 6 * USUAL_S


def test_a_silent_one_holds_up_a_few_iterations_of_many_and_none_for_long():
    awaited = Awaited(PATIENCE_S)
    for iteration in range(5):
        lasts(awaited, iteration, {"a": USUAL_S, "b": USUAL_S})
    silent = [
        lasts(awaited, iteration, {"a": USUAL_S, "b": USUAL_S, "liar": None})
        for iteration in range(5, 5 + 4 * MOST_LEFT_OUT)
    ]
    held_up = [lasted_s for lasted_s in silent if lasted_s > USUAL_S]
    assert len(held_up) <= 12
    assert max(held_up) <= 8 * USUAL_S
    assert sum(silent) < 1.4 * USUAL_S * len(silent)


def test_one_that_comes_again_is_waited_for_again():
    awaited = Awaited(PATIENCE_S)
    for iteration in range(5):
        lasts(awaited, iteration, {"a": USUAL_S, "b": USUAL_S})
    assert lasts(awaited, 5, {"a": USUAL_S, "b": None}) > USUAL_S
    assert lasts(awaited, 6, {"a": USUAL_S, "b": None}) == USUAL_S
    assert lasts(awaited, 7, {"a": USUAL_S, "b": 3 * USUAL_S}) == 3 * USUAL_S
    assert lasts(awaited, 8, {"a": USUAL_S, "b": 3 * USUAL_S}) == 3 * USUAL_S
    left_out = [lasts(awaited, n, {"a": USUAL_S, "b": None}) == USUAL_S for n in range(9, 13)]
    assert left_out == [False, True, False, True]  # of one, as the first time, and then of two


@pytest.mark.parametrize("silent", [["b"], ["b", "c"]], ids=len)
def test_before_enough_was_seen_or_where_most_are_silent_the_patience_holds(silent):
    awaited = Awaited(PATIENCE_S)
    assert lasts(awaited, 0, {"a": USUAL_S, **dict.fromkeys(silent)}) == PATIENCE_S


def test_where_all_are_left_out_all_are_waited_for():
    awaited = Awaited(PATIENCE_S)
    assert lasts(awaited, 0, {"a": None, "b": None}) == PATIENCE_S
    assert lasts(awaited, 1, {"a": USUAL_S, "b": USUAL_S}) == USUAL_S


def test_short_iterations_are_waited_for_longer_than_several_of_them():
    awaited = Awaited(PATIENCE_S)
    for iteration in range(5):
        lasts(awaited, iteration, {"a": TICK_S, "b": TICK_S})
    assert lasts(awaited, 5, {"a": TICK_S, "b": None}) == FLOOR_S


def test_a_relay_steps_without_a_data_peer_that_announces_nothing():
    relay, now_s, lasted = RelayCore(slots=4, patience_s=PATIENCE_S), 0.0, list[float]()
    relay.peers_changed(("a", "b"), now_s, ended=False)
    for iteration in range(1, 30):
        if iteration == 6:
            relay.peers_changed(("a", "b", "liar"), now_s, ended=False)
        began_s = now_s
        commands = relay.announced("a", iteration, now_s)
        commands += relay.announced("b", iteration, now_s)
        now_s += USUAL_S if not any(isinstance(c, Finish) for c in commands) else 0.0
        while not any(isinstance(each, Finish) for each in commands):
            commands = [
                *relay.announced("a", iteration + 1, now_s),
                *relay.announced("b", iteration + 1, now_s),
                *relay.ticked(now_s),
            ]
            now_s += TICK_S
        relay.stepped(now_s)
        lasted.append(now_s - began_s)
    assert relay.iteration == 30
    assert max(lasted) < 10 * USUAL_S
