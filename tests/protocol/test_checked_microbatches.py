"""Microbatches are checked on their way: a lying relay is left out, and nothing counts twice."""

import pytest
from chaos_worlds import ChaosWorld
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from protocol.microbatch import checks
from protocol.microbatch.core import MicrobatchEvent

SEEDS = st.integers(0, 100_000)
PHASES = (Phase.explicit, Phase.generate)
LIAR = "relay-2-0"
OFTEN = 4
"""One of so many is checked in most of these tests, for they are short."""


def replicas(relay, _is_copy):
    """Honest relays make nearly the same."""
    return 0.05 * int(relay[-1])


def lies(relay, is_copy):
    return replicas(relay, is_copy) + (1.0 if relay == LIAR else 0.0)


def world_of(seed, made, *, troubles=0, data_peers=2, checked=True):
    seed_of = str(seed) if checked else None
    sizes = {"data_peers": data_peers, "relays": (3, 3), "visited": 3}
    world = ChaosWorld(seed, troubles, **sizes, checks=seed_of)
    world.made = made
    return world


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(checks, "CHECKED", OFTEN)


def run(world, iterations):
    assert world.run(iterations)
    world.look_around()
    return world


def left_out(world):
    """By each data peer."""
    return [world.nodes[name].core._relays.odd for name in world.origins]


def assert_counted_once(world):
    world.settle()
    for stage in range(1, len(world.stages) + 1):
        assert {world.applied[stage, each] for each in world.home()} == {1}


@pytest.mark.slow
@pytest.mark.usefixtures("often")
@given(SEEDS)
@settings(max_examples=4, deadline=None, phases=PHASES)
def test_a_liar_is_left_out_and_nobody_else_and_all_count_once(seed):
    """Within 40 iterations of 4 microbatches each, of which one in four is checked."""
    world = run(world_of(seed, lies), 40)
    assert left_out(world) == [{LIAR}, {LIAR}]
    begun, done, lost = world.ends()
    assert (begun, lost) == (done, 0)
    assert_counted_once(world)
    before = world.forwards[LIAR]
    world.run(45)
    assert world.forwards[LIAR] == before


@pytest.mark.slow
@given(SEEDS)
@settings(max_examples=2, deadline=None, phases=PHASES)
def test_without_checks_nobody_notices(seed):
    world = run(world_of(seed, lies, checked=False), 20)
    assert left_out(world) == [set(), set()]
    assert not world.differing
    assert world.total(MicrobatchEvent.CHECKED) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("often")
@given(SEEDS)
@settings(max_examples=4, deadline=None, phases=PHASES)
def test_honest_relays_that_die_and_come_back_are_never_left_out(seed):
    world = run(world_of(seed, replicas, troubles=3), 20)
    assert left_out(world) == [set(), set()]
    assert not world.differing
    assert world.total(MicrobatchEvent.CHECKED) > 0


@pytest.mark.slow
def test_checks_cost_less_than_three_of_a_hundred():
    """Forwards of copies are a third of what a microbatch's forward and backward take."""
    world = run(world_of(1, replicas), 250)
    _, done, _ = world.ends()
    paths = sum(world.forwards.values()) / 2  # each visits two relays
    extra = (paths - done) / (3 * done)
    assert 0.005 < extra < 0.03
    assert_counted_once(world)
