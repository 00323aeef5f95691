"""Microbatches over relays: every one comes back, or is dropped; each gradient counts once."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from microbatch_worlds import PATIENCE_S, MicrobatchWorld

from protocol.limits import MAX_REMEMBERED
from protocol.microbatch.core import MicrobatchEvent, SendBoundary
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.iterations import Announced
from protocol.microbatch.relay import RelayCore
from protocol.microbatch.trainer_messages import Finish
from protocol.pipeline.problem import PathRules
from protocol.routing.routers import RandomRouter
from protocol.wire.stage_messages import Direction

ENDS = (MicrobatchEvent.BEGUN, MicrobatchEvent.DONE, MicrobatchEvent.LOST)
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
        assert counts[MicrobatchEvent.AGAIN] == 0
    for node in relays_of(world):
        assert set(node.books.added.values()) <= {1}
        assert node.core.counts[MicrobatchEvent.LOST] == node.core.counts[MicrobatchEvent.LATE] == 0


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


@given(SEEDS, st.integers(2, 3), st.floats(0.6, 0.85))
@settings(max_examples=40, deadline=None)
def test_relays_that_hear_late_who_trains_wait_for_nobody_in_vain(seed, data_peers, hears_late):
    """Which data peers train is heard by beats; what they announce does not wait for those."""
    world = MicrobatchWorld(seed, data_peers, relays=(2,), visited=2, microbatches=2)
    world.hears_late = hears_late
    assert world.run(iterations=4)
    assert world.now_s < PATIENCE_S


def test_what_is_announced_before_it_is_known_who_trains_stands() -> None:
    """The other data peer ends its iteration just after that has become known."""
    relay = RelayCore(slots=4, patience_s=PATIENCE_S)
    relay.peers_changed(("slow",), 0.0, ended=False)
    relay.announced("slow", 1, 0.0)
    for iteration in (1, 2):
        relay.announced("fast", iteration, 0.1)
    relay.peers_changed(("slow",), 0.5, ended=False)
    assert relay.peers_changed(("slow", "fast"), 1.0, ended=False) == []
    assert relay.announced("slow", 2, 1.1) == [Finish()]


def test_of_those_that_train_no_more_so_many_announcements_stand() -> None:
    announced = Announced()
    for number in range(MAX_REMEMBERED + 10):
        announced.add(str(number), number)
    announced.update_present(("0",))
    assert sorted(announced.newest_of.values()) == [0, *range(10, MAX_REMEMBERED + 10)]
    assert announced.middle_of(announced.present) == announced.least == 0


@given(SEEDS, st.floats(0.01, 0.3))
@settings(max_examples=40, deadline=None)
def test_hops_that_fail_cost_their_microbatch_and_nothing_else(seed, failing):
    world = MicrobatchWorld(seed)
    world.failing = failing
    assert world.run(iterations=3)
    for name in world.origins:
        counts = world.nodes[name].core.counts
        assert (
            counts[MicrobatchEvent.BEGUN]
            == counts[MicrobatchEvent.DONE] + counts[MicrobatchEvent.LOST]
        )
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
    assert not +core.counts
    world.nodes["relay-2-0"].alive = True
    world.look_around()
    while world.todo:
        world.todo.pop(0)()
    assert core.counts[MicrobatchEvent.DONE] == world.microbatches


def test_a_data_peer_that_is_behind_goes_on_where_the_others_are():
    world = MicrobatchWorld(1, data_peers=2, relays=(1, 1), microbatches=2)
    world.nodes["data-0"].core.iteration = 40
    assert world.run(iterations=4)
    cores = [world.nodes[name].core for name in world.origins]
    assert min(core.iteration for core in cores) > 40


@given(SEEDS, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_slots_are_never_waited_for_in_a_circle(seed, slots):
    world = MicrobatchWorld(seed, 3, relays=(1, 1, 1, 1), visited=4, microbatches=6, slots=slots)
    assert world.run(iterations=2)
    assert world.now_s < PATIENCE_S  # nobody was waited for in vain
    counts = [world.nodes[name].core.counts for name in world.origins]
    assert [each[MicrobatchEvent.DONE] for each in counts] == [12] * 3


def test_paths_skip_stages_in_turn_and_every_so_often_none():
    router = RandomRouter("me", 7, 3, PathRules(), full_every=4)
    core = DataPeerCore("me", router, 60.0)
    core.peers_changed((("a",), ("b",), ("c",)), 0.0, trained=False)
    lengths, visits = [], Counter[str]()
    for iteration in range(8):
        commands = core.begun(6, float(iteration))
        numbers = range(6 * iteration, 6 * iteration + 6)
        for number in numbers:
            commands += core.produced(Direction.FORWARD, number, number, None, float(iteration))
        paths = [
            command.hop.path.relays for command in commands if isinstance(command, SendBoundary)
        ]
        lengths.append(sum(map(len, paths)))
        visits.update(relay for path in paths for relay in path)
        for number in numbers:
            core.returned(number, float(iteration))
    assert lengths == [12, 12, 12, 18] * 2
    assert set(visits.values()) == {36}


def test_a_data_peer_that_announces_one_far_ahead_takes_nobody_along() -> None:
    relay = RelayCore(slots=4, patience_s=600.0)
    relay.peers_changed(("a", "b", "liar"), 0.0, ended=False)
    relay.announced("a", 7, 0.0)
    relay.announced("liar", 10**9, 0.0)
    relay.announced("b", 7, 0.0)
    assert [relay.newest_for(each) for each in ("a", "b", "liar")] == [7, 7, 7]
