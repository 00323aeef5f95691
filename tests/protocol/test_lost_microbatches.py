"""Relays die with microbatches in hand: every one ends once, and counts once in every stage."""

import pytest
from chaos_worlds import ChaosWorld
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from microbatch_worlds import PATIENCE_S, MicrobatchWorld

from protocol.microbatch.core import MicrobatchEvent
from protocol.wire.stage_messages import Direction

SEEDS = st.integers(0, 100_000)
PHASES = (Phase.explicit, Phase.generate)  # a failure names its seed; smaller ones say no more
ITERATIONS = 4


def assert_sound(world):
    """One end for each microbatch; no stage counts it twice; what is missing has been counted.

    No offer is left that was made ahead.
    """
    world.look_around()  # deaths after the last microbatch are heard of, too
    world.settle()
    begun, done, lost = world.ends()
    assert begun == ITERATIONS * len(world.origins) * world.microbatches == done + lost
    assert done == sum(len(world.nodes[name].books.added) for name in world.origins)
    assert set(world.applied.values()) <= {1}
    of_done = [key for key in world.applied if key[1] in world.home()]
    gone = sum(node.core.counts[MicrobatchEvent.GONE] for node in world.all_nodes)
    assert len(world.stages) * done - len(of_done) <= gone
    assert not [hop for asker, hop in world.ahead if world.is_here(asker)]


@given(SEEDS, st.integers(0, 12), st.integers(1, 3), st.integers(2, 3))
@settings(max_examples=40, deadline=None, phases=PHASES)
def test_whatever_dies_every_microbatch_ends_once_and_counts_once(seed, troubles, peers, replicas):
    world = ChaosWorld(seed, troubles, data_peers=peers, relays=(replicas,) * 3, visited=4)
    assert world.run(ITERATIONS)
    assert world.now_s < PATIENCE_S / 2  # nothing is waited for in vain
    assert_sound(world)


@given(SEEDS, st.integers(0, 12), st.floats(0.01, 0.2))
@settings(max_examples=25, deadline=None, phases=PHASES)
def test_so_do_those_whose_messages_fail_too(seed, troubles, failing):
    world = ChaosWorld(seed, troubles, data_peers=2, relays=(2, 2, 2), visited=4)
    world.failing = failing
    assert world.run(ITERATIONS)
    assert_sound(world)


@given(SEEDS, st.integers(1, 12))
@settings(max_examples=25, deadline=None, phases=PHASES)
def test_a_stage_may_lose_all_its_relays(seed, troubles):
    world = ChaosWorld(seed, troubles, spare=False, relays=(2, 1, 2), visited=4)
    assert world.run(ITERATIONS)
    assert_sound(world)


def walked_to(world, direction, place):
    """Run until a hop to this place has been taken; whatever else is under way waits."""
    world.look_around()
    world.begin("data-0")
    for _ in range(500):
        world.todo.pop(0)()
        if (direction, place) in world.taken:
            return
    raise AssertionError("it never came there")


def done_by(world):
    for _ in range(2000):
        if world.todo:
            world.todo.pop(0)()
        elif world.out["data-0"]:
            world.now_s += 1.0
            world.look_around()
        else:
            return world.nodes["data-0"].core.counts
    raise AssertionError("it does not end")


def one_microbatch(replicas=2):
    return MicrobatchWorld(3, data_peers=1, relays=(replicas,) * 3, visited=4, microbatches=1)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_relay_that_dies_with_a_gradient_in_hand_has_a_stand_in(place):
    world = one_microbatch()
    walked_to(world, Direction.BACKWARD, place)
    path = world.path
    world.kill(path[place - 1])
    counts = done_by(world)
    assert (
        counts[MicrobatchEvent.DONE],
        counts[MicrobatchEvent.MENDED],
        counts[MicrobatchEvent.LOST],
    ) == (1, 1, 0)
    stand_in = next(n for n in world.stages[place - 1] if n not in path)
    assert world.nodes[stand_in].core.counts[MicrobatchEvent.REPLAYED] == 1
    assert world.forwards[stand_in] == 1
    for other in set(path) - {path[place - 1]}:
        assert world.forwards[other] == 2  # nobody else takes its place
        assert world.nodes[other].books.added.total() == 1


def test_two_neighbours_that_die_are_both_replaced():
    world = one_microbatch()
    walked_to(world, Direction.BACKWARD, 1)
    path = world.path
    world.kill(path[0])
    world.kill(path[1])
    counts = done_by(world)
    assert (counts[MicrobatchEvent.DONE], counts[MicrobatchEvent.LOST]) == (1, 0)
    assert world.forwards[path[2]] in (1, 2)
    assert world.nodes[path[2]].books.added.total() == 1
    world.settle()
    assert set(world.applied.values()) == {1}
    assert len(world.applied) == 3


def test_that_it_is_lost_is_said_again_until_every_relay_has_noted_it():
    world = one_microbatch()
    walked_to(world, Direction.BACKWARD, 2)
    path, world.failing = world.path, 1.0
    world.kill(path[1])
    world.look_around()
    while world.todo:
        world.todo.pop(0)()
    assert world.forwards[path[0]] == 1
    world.failing = 0.0
    counts = done_by(world)
    assert (counts[MicrobatchEvent.DONE], counts[MicrobatchEvent.LOST]) == (1, 0)
    world.settle()
    assert set(world.applied.values()) == {1}
