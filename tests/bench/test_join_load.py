"""The figures of bench/join_load.py, out of an event log."""

import pytest

from bench.gossip_report import Window
from bench.join_load import Part, goals, part_of
from peer.observe.event_names import EventName


def closed(time, *, steps=10, seconds=4.0):
    return {"event": EventName.ROUND_CLOSED, "time": time, "steps": steps, "seconds": seconds}


def test_a_part_counts_from_the_first_end_of_a_round_in_it_to_the_last():
    log = [closed(5.0), closed(10.0), closed(15.0), closed(20.0, steps=5), closed(25.0)]
    part = part_of("quiet", log, Window(8.0, 22.0))
    assert (part.rounds, part.seconds) == (3, 14.0)
    assert part.steps_per_s == pytest.approx(15 / 10)
    assert part.blocked == pytest.approx(1 - 8 / 10)


def test_goals_compare_joining_with_quiet_and_with_the_control():
    quiet, joining, control = (
        Part(name, 90.0, 9, steps, blocked)
        for name, steps, blocked in (("q", 2.0, 0.05), ("j", 1.2, 0.07), ("c", 1.25, 0.05))
    )
    blocked, speed = goals([[quiet, joining, control]])
    assert blocked.measured == pytest.approx(0.02)
    assert blocked.met
    assert speed.measured == pytest.approx(0.96)
    assert not speed.met
