"""What is left of a run follows from how its nominal step has moved of late."""

import pytest

from protocol.schedule.rounds import LEAST_S, WINDOW_S, RunPace


def paced(steps_per_s: float, seconds: float, start: float = 0.0, every_s: float = 1.0) -> RunPace:
    pace, now_s = RunPace(), 0.0
    while now_s <= seconds:
        pace.note(now_s, start + steps_per_s * now_s)
        now_s += every_s
    return pace


def test_nothing_is_said_before_enough_was_seen():
    assert RunPace().left_s(100) is None
    assert paced(2.0, LEAST_S - 1).left_s(100) is None
    assert paced(0.0, 60.0).left_s(100) is None


def test_what_is_left_is_at_the_pace_of_the_run():
    pace = paced(2.0, 60.0)
    assert pace.steps_per_s() == pytest.approx(2.0)
    assert pace.left_s(1120) == pytest.approx(500.0)
    assert pace.left_s(100) == 0.0


def test_only_the_last_minutes_count():
    pace = paced(10.0, 1000.0)
    now_s, step = 1000.0, 10_000.0
    for _ in range(int(WINDOW_S) + 2):
        now_s, step = now_s + 1, step + 1
        pace.note(now_s, step)
    assert pace.steps_per_s() == pytest.approx(1.0)


@pytest.mark.parametrize("step", [3.0, 5000.0], ids=["falls", "leaps"])
def test_another_state_is_another_beginning(step):
    pace = paced(1.0, 60.0)
    pace.note(61.0, step)
    assert pace.steps_per_s() is None
    pace.note(71.0, step + 10)
    assert pace.steps_per_s() == pytest.approx(1.0)


def test_rounds_that_are_told_seldom_are_no_leaps():
    pace = RunPace()
    for number in range(10):
        pace.note(60.0 * number, 50.0 * number)
    assert pace.steps_per_s() == pytest.approx(50 / 60)


def test_after_a_rest_the_pace_is_found_anew():
    pace = paced(1.0, 60.0)
    pace.rest()
    assert pace.steps_per_s() is None
