"""A stage that has lost all its peers is left out where paths allow it, else it is waited for."""

import pytest
from chaos_worlds import ChaosWorld
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from microbatch_worlds import PATIENCE_S, MicrobatchWorld

from protocol.microbatch.core import MicrobatchEvent
from protocol.pipeline.problem import PathRules
from protocol.routing.routers import RandomRouter
from protocol.wire.stage_messages import Direction

SEEDS = st.integers(0, 100_000)
PHASES = (Phase.explicit, Phase.generate)  # a failure names its seed; smaller ones say no more
MISSING = "relay-2-0"


def world_without(missing=MISSING, **sizes):
    """Three relay stages of a relay each, of which paths visit two; one of the relays is dead."""
    sizes = {"data_peers": 1, "relays": (1, 1, 1), "visited": 3} | sizes
    world = MicrobatchWorld(0, **sizes)
    world.nodes[missing].alive = False
    return world


def settled(world, seconds=5):
    """Let so many seconds pass, in which everything happens that can."""
    for _ in range(seconds):
        while world.todo:
            world.todo.pop(0)()
        world.now_s += 1.0
        world.look_around()


def begun(world):
    world.look_around()
    world.begin("data-0")
    settled(world)
    return world.nodes["data-0"].core


def test_a_stage_that_nobody_holds_is_left_out():
    world = world_without()
    core = begun(world)
    counts = core.counts
    assert (counts[MicrobatchEvent.DONE], counts[MicrobatchEvent.LOST]) == (world.microbatches, 0)
    assert counts[MicrobatchEvent.WITHOUT] == world.microbatches
    assert core.left_out == core.missing_stages == (2,)
    assert not world.forwards[MISSING]
    assert world.forwards["relay-1-0"] == world.forwards["relay-3-0"] == world.microbatches


def test_it_is_trained_again_from_the_next_iteration_on():
    world = world_without()
    core = begun(world)
    world.revive(MISSING)
    begun(world)
    assert core.left_out == core.missing_stages == ()
    assert core.counts[MicrobatchEvent.WITHOUT] == world.microbatches
    assert 0 < world.forwards[MISSING] < world.microbatches


def test_before_anything_is_trained_every_stage_is_waited_for():
    world = world_without()
    world.trained = False
    core = begun(world)
    assert not +core.counts
    assert core.left_out == ()
    world.trained = True
    settled(world)
    assert core.counts[MicrobatchEvent.DONE] == world.microbatches


def test_it_is_waited_for_where_no_path_may_leave_it_out():
    far = PathRules(max_jump=1)
    for sizes in ({"visited": 4}, {"rules": far, "missing": "relay-1-0"}):
        core = begun(world_without(**sizes))
        assert not +core.counts, sizes


def test_an_iteration_that_would_skip_nothing_skips_what_nobody_holds():
    router = RandomRouter("me", 7, 3, PathRules(), full_every=1)
    relays = (("a",), (), ("c",))
    paths = router.paths(1, 4, relays)
    assert {path.stages for path in paths} == {(1, 3)}
    whole = router.paths(1, 1, (("a",), ("b",), ("c",)))[0]
    assert whole.stages == (1, 2, 3)
    again = router.another(whole, 1, relays)
    assert again is not None
    assert again.stages == (1, 3)


def test_what_was_on_its_way_to_the_loss_goes_past_it():
    world = world_without(missing="relay-3-0", microbatches=1)
    world.revive("relay-3-0")
    world.look_around()
    world.begin("data-0")
    while (Direction.FORWARD, 1) not in world.taken:
        world.todo.pop(0)()
    world.kill(world.path[-1])
    settled(world)
    counts = world.nodes["data-0"].core.counts
    assert counts[MicrobatchEvent.AGAIN] >= 1
    assert (
        counts[MicrobatchEvent.DONE],
        counts[MicrobatchEvent.WITHOUT],
        counts[MicrobatchEvent.LOST],
    ) == (1, 1, 0)


def turned_and_stranded(visited):
    """A microbatch has come to the loss, and the last relay of its path is gone for good."""
    world = MicrobatchWorld(0, 1, relays=(1, 1, 1), visited=visited, microbatches=1)
    world.look_around()
    world.begin("data-0")
    while (Direction.FORWARD, visited) not in world.taken:
        world.todo.pop(0)()
    world.kill(world.path[-1])
    return world


def test_what_is_on_its_way_back_goes_past_a_stage_that_nobody_holds():
    world = turned_and_stranded(visited=3)
    settled(world)
    counts = world.nodes["data-0"].core.counts
    assert (
        counts[MicrobatchEvent.LOST],
        counts[MicrobatchEvent.DONE],
        counts[MicrobatchEvent.WITHOUT],
    ) == (0, 1, 1)
    assert set(world.applied.values()) <= {1}


@pytest.mark.parametrize("seed", range(8))
def test_those_that_have_added_its_gradient_are_on_the_way_past_that_stage(seed):
    world = MicrobatchWorld(seed, 1, relays=(2, 2, 2, 2), visited=3, microbatches=1)
    world.look_around()
    world.begin("data-0")
    while (Direction.BACKWARD, 1) not in world.taken:
        world.todo.pop(0)()
    first, last = world.path
    for name in world.stages[world.stage_of(first) - 1]:
        world.kill(name)
    settled(world)
    assert last in world.path
    assert world.nodes["data-0"].core.counts[MicrobatchEvent.DONE] == 1
    world.settle()
    assert set(world.applied.values()) == {1}


def test_it_waits_for_somebody_where_no_path_may_leave_that_stage_out():
    world = turned_and_stranded(visited=4)
    settled(world, int(PATIENCE_S) - 5)
    counts = world.nodes["data-0"].core.counts
    assert counts[MicrobatchEvent.LOST] == counts[MicrobatchEvent.DONE] == 0
    settled(world, 10)
    assert counts[MicrobatchEvent.LOST] == 1


@given(SEEDS, st.integers(1, 12), st.integers(1, 2))
@settings(max_examples=30, deadline=None, phases=PHASES)
def test_stages_come_and_go_and_every_microbatch_ends_once(seed, troubles, peers):
    world = ChaosWorld(seed, troubles, spare=False, data_peers=peers, relays=(2, 1, 1), visited=3)
    assert world.run(4)
    world.settle()
    begun_, done, lost = world.ends()
    assert begun_ == 4 * peers * world.microbatches == done + lost
    assert world.total(MicrobatchEvent.WITHOUT) <= done
    assert set(world.applied.values()) <= {1}
