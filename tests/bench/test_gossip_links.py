"""The world in which gossip's own decisions are measured, and what its figures say."""

import math
from dataclasses import replace

import pytest

from bench.gossip.agenda import Agenda
from bench.gossip.lines import SharedLines
from bench.gossip.measures import pair_figures, quantile
from bench.gossip.world import INNER_STEPS, ROUND_S, world_of
from bench.gossip_links import figures, goals, means
from bench.gossip_world import GossipWorld


def _run(world, rounds, seed=0):
    run = GossipWorld(world, seed)
    run.run(rounds * ROUND_S)
    return run


# --- lines ----------------------------------------------------------------------------------------
def _arrivals(*transfers):
    """When each arrives, of (begin, seconds alone by line)."""
    agenda = Agenda()
    lines = SharedLines(agenda)
    arrived: dict[int, float] = {}
    for number, (begin_s, alone_s) in enumerate(transfers):

        def arrive(number=number):
            arrived[number] = agenda.now_s

        def begin(alone_s=alone_s, arrive=arrive):
            lines.begin(alone_s, arrive)

        agenda.after(begin_s, begin)
    agenda.run(1000.0)
    return [arrived[number] for number in range(len(transfers))]


def test_a_transfer_alone_is_as_fast_as_its_worst_line():
    assert _arrivals((0, {"a": 10.0})) == pytest.approx([10.0])
    assert _arrivals((0, {"a": 10.0, "home": 25.0})) == pytest.approx([25.0])


def test_two_on_one_line_take_twice_as_long_while_both_are_there():
    both = _arrivals((0, {"home": 10.0}), (0, {"home": 10.0}))
    assert both == pytest.approx([20.0, 20.0])
    # The first has 5 s left when the second comes: 10 s for that, then the second is alone again.
    assert _arrivals((0, {"home": 10.0}), (5, {"home": 10.0})) == pytest.approx([15.0, 20.0])
    assert _arrivals((0, {"a": 10.0}), (0, {"b": 10.0})) == pytest.approx([10.0, 10.0])


# --- measures -------------------------------------------------------------------------------------
def test_evenness_of_pairs():
    even = pair_figures([(0, 1), (0, 2), (2, 1)] * 4, 3)
    assert (even.meetings, even.least, even.most, even.cv, even.repeats) == (12, 1, 1, 0, 0)
    one = pair_figures([(0, 1), (1, 0), (0, 1), (1, 0)], 3)
    assert one.repeats == 3 / 4
    assert (one.least, one.most) == (0, 3)
    assert one.cv == pytest.approx(math.sqrt(2))
    assert one.chi_squared == pytest.approx(8 / 3)


def test_a_repeat_is_of_the_partner_just_before():
    assert pair_figures([(0, 1), (2, 3), (1, 0), (0, 2)], 4).repeats == pytest.approx(2 / 8)


def test_quantiles():
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 3.0
    assert quantile([1.0], 0.99) == 1.0
    assert math.isnan(quantile([], 0.5))


# --- worlds ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_peers", [6, 24])
def test_the_middle_peer_s_round_is_as_long_as_said(num_peers):
    world = world_of(num_peers, 0.5, seed=1)
    rounds_s = [world.owed(place) * world.step_s[place] for place in range(num_peers)]
    assert rounds_s == pytest.approx([ROUND_S] * num_peers, rel=0.11)
    vectors_s = [line.vector_s for line in world.lines.values()]
    assert 0.5 * ROUND_S / 1.5 <= min(vectors_s) < 0.5 * ROUND_S < max(vectors_s) <= 0.75 * ROUND_S


def test_who_shares_an_uplink_says_so():
    world = world_of(6, 0.5, seed=1)
    assert set(world.alone_s(0, 2)) == {"home", "0-2"}
    assert set(world.alone_s(0, 1)) == {"home", "0-1"}
    assert set(world.alone_s(2, 3)) == {"2-3"}
    assert world_of(6, 0.5, seed=1, equal=True).uplinks == {}


def test_two_peers_average_once_a_round():
    run = _run(world_of(2, 0.25, seed=0, equal=True, scatter=0.0), rounds=20)
    assert all(18 <= record.averaged <= 21 for record in run.records)
    assert all(not record.skipped for record in run.records)
    exchange = run.exchanges[3]
    line = world_of(2, 0.25, seed=0, equal=True).line(0, 1)
    assert exchange.ended_s - exchange.began_s == pytest.approx(15 + 2 * line.latency_s)


def test_a_peer_alone_with_one_that_never_meets_it_trains_on():
    world = world_of(2, 0.25, seed=0, equal=True, scatter=0.0)
    slow = replace(world, step_s=(1.0, 1e6))
    run = _run(slow, rounds=10)
    assert run.records[0].averaged == 0
    assert run.records[0].own_steps == 10 * ROUND_S


# --- figures --------------------------------------------------------------------------------------
def test_figures_follow_the_seed():
    world = world_of(6, 0.7, seed=3)
    assert figures(world, _run(world, 30)) == figures(world, _run(world, 30))
    assert figures(world, _run(world, 30)) != figures(world, _run(world, 30, seed=1))


@pytest.mark.slow
def test_two_dozen_peers_average_nearly_every_round_that_is_trained():
    world = world_of(24, 0.25, seed=0)
    found = figures(world, _run(world, 30))
    assert found["exchanged"] >= 0.95
    assert found["uplink"] >= 0.95
    assert found["repeats"] < 0.05
    assert found["pace"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.slow
def test_where_lines_are_thin_they_are_busy_and_the_schedule_keeps_to_the_training():
    world = world_of(6, 1.5, seed=0)
    found = figures(world, _run(world, 80))
    assert found["busy"] >= 0.85
    assert found["exchanged"] < INNER_STEPS / (1.0 * ROUND_S)
    assert found["pace"] == pytest.approx(1.0, abs=0.05)


def test_goals_are_about_thick_lines_and_thin_ones():
    thick = {"exchanged": 0.96, "least": 0.8, "busy": 0.2, "repeats": 0.2, "pace": 1.0}
    thin = thick | {"exchanged": 0.4, "least": 0.5, "busy": 0.8, "pace": 1.2}
    mean = means([thick, thin])
    assert mean["exchanged"] == pytest.approx(0.68)
    assert mean["least"] == 0.5
    rows = [
        {"world": "unequal", "peers": 24, "ratio": 0.7} | thick,
        {"world": "unequal", "peers": 24, "ratio": 1.5} | thin,
        {"world": "steady", "peers": 24, "ratio": 0.7} | thick,
        {"world": "equal", "peers": 24, "ratio": 0.7} | thin,
    ]
    assert [goal.met for goal in goals(rows)] == [True, True, False, False, False]
