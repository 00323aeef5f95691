"""Microbatches over relays: every one comes back, or is dropped; each gradient counts once."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from microbatch_worlds import MicrobatchWorld

from protocol.microbatch.commands import Send
from protocol.microbatch.counts import Counted
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.trip import Leg

ENDS = (Counted.BEGUN, Counted.DONE, Counted.LOST)
SEEDS = st.integers(0, 10_000)


def relays_of(world):
    return [node for name, node in world.nodes.items() if name not in world.origins]


@given(SEEDS, st.integers(1, 3), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_all_come_back_in_whatever_order_things_happen(seed, data_peers, microbatches):
    world = MicrobatchWorld(seed, data_peers, microbatches=microbatches)
    assert world.run(iterations=3)
    for name in world.origins:
        counts = world.nodes[name].core.counts
        assert [counts[what] for what in ENDS] == [3 * microbatches] * 2 + [0]
    for node in relays_of(world):
        assert set(node.books.added.values()) <= {1}
        assert node.core.counts[Counted.LOST] == node.core.counts[Counted.LATE] == 0


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_relays_step_once_an_iteration_with_the_same_total(seed):
    """Two stages of two relays, all visited: each stage adds every gradient of every iteration."""
    world = MicrobatchWorld(seed, data_peers=2, microbatches=3)
    assert world.run(iterations=4)
    for stage in world.stages:
        steps = [world.nodes[name].books.steps for name in stage]
        whole = [list(each[:3]) for each in steps]
        assert [sum(counts) for counts in zip(*whole, strict=True)] == [6, 6, 6]


@given(SEEDS, st.floats(0.01, 0.3))
@settings(max_examples=40, deadline=None)
def test_trips_that_fail_cost_their_microbatch_and_nothing_else(seed, failing):
    world = MicrobatchWorld(seed)
    world.failing = failing
    assert world.run(iterations=3)
    for name in world.origins:
        counts = world.nodes[name].core.counts
        assert counts[Counted.BEGUN] == counts[Counted.DONE] + counts[Counted.LOST]
    assert all(set(node.books.added.values()) <= {1} for node in relays_of(world))


@pytest.mark.parametrize("seed", range(8))
def test_a_relay_that_dies_stops_nobody(seed):
    world = MicrobatchWorld(seed, data_peers=2, relays=(2, 2), microbatches=4)
    world.look_around()
    for name in world.origins:
        world.begin(name)
    for _ in range(30):
        if world.todo:
            world.todo.pop(world.random.randrange(len(world.todo)))()
    world.kill("relay-1-0")
    for _ in range(20_000):
        if world.is_done(1):
            break
        if world.todo:
            world.todo.pop(world.random.randrange(len(world.todo)))()
        else:
            world.now_s += 1.0
            world.look_around()
    assert world.is_done(1)
    assert world.now_s < 10  # it is seen that the relay is gone: nobody waits for long


def test_a_data_peer_waits_for_a_peer_of_each_stage():
    world = MicrobatchWorld(0, data_peers=1, relays=(1, 1))
    world.nodes["relay-2-0"].alive = False
    world.look_around()
    world.begin("data-0")
    for _ in range(50):
        while world.todo:
            world.todo.pop(0)()
        world.now_s += 1.0
        world.look_around()
    core = world.nodes["data-0"].core
    assert core.missing_stages == (2,)
    assert not core.counts
    world.nodes["relay-2-0"].alive = True
    world.look_around()
    while world.todo:
        world.todo.pop(0)()
    assert core.counts[Counted.DONE] == world.microbatches


def test_a_data_peer_that_is_behind_goes_on_where_the_others_are():
    world = MicrobatchWorld(1, data_peers=2, relays=(1, 1), microbatches=2)
    world.nodes["data-0"].core.iteration = 40
    assert world.run(iterations=4)
    cores = [world.nodes[name].core for name in world.origins]
    assert min(core.iteration for core in cores) > 40


def test_paths_skip_stages_in_turn_and_every_so_often_none():
    core = DataPeerCore("me", 3, 60.0, full_every=4)
    core.present((("a",), ("b",), ("c",)), 0.0)
    lengths, visits = [], Counter[str]()
    for iteration in range(8):
        commands = core.begun(6, float(iteration))
        numbers = range(6 * iteration, 6 * iteration + 6)
        for number in numbers:
            commands += core.produced(Leg.FORWARD, number, number, None, float(iteration))
        paths = [command.trip.path for command in commands if isinstance(command, Send)]
        lengths.append(sum(map(len, paths)))
        visits.update(relay for path in paths for relay in path)
        for number in numbers:
            core.returned(number, float(iteration))
    assert lengths == [12, 12, 12, 18] * 2
    assert set(visits.values()) == {36}
