"""What is refused goes another way: nothing of others is lost, whoever of the two is the liar."""

from collections import Counter

import pytest
from chaos_worlds import ChaosWorld
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from microbatch_worlds import PATIENCE_S

from protocol.microbatch.core import AnswerOffer, MicrobatchEvent, SendNotice
from protocol.microbatch.relay import RelayCore
from protocol.wire.stage_messages import Direction, Hop, Lost, Microbatch, Path

SEEDS = st.integers(0, 100_000)
PHASES = (Phase.explicit, Phase.generate)
ITERATIONS = 4
DIRECTIONS = [(Direction.FORWARD,), (Direction.BACKWARD,), (Direction.FORWARD, Direction.BACKWARD)]
LIAR = "relay-2-0"


def world_of(seed, replicas=2):
    return ChaosWorld(seed, 0, data_peers=2, relays=(replicas,) * 3, visited=4)


def assert_all_done(world):
    begun, done, lost = world.ends()
    assert begun == done == ITERATIONS * len(world.origins) * world.microbatches
    assert lost == 0
    assert world.now_s < PATIENCE_S / 2  # nothing is waited for in vain


def times_of(world):
    """How often each microbatch that came home counts in each stage."""
    world.settle()
    home = world.home()
    return {
        stage: Counter(world.applied[stage, each] for each in home)
        for stage in range(1, len(world.stages) + 1)
    }


@pytest.mark.parametrize("directions", DIRECTIONS, ids=["forward", "backward", "both"])
@given(SEEDS)
@settings(max_examples=15, deadline=None, phases=PHASES)
def test_what_one_relay_sends_is_refused_and_all_come_home(directions, seed):
    world = world_of(seed)
    world.is_refused = lambda hop: hop.sender == LIAR and hop.direction in directions
    assert world.run(ITERATIONS)
    assert_all_done(world)
    for stage, times in times_of(world).items():
        assert set(times) <= ({1, 2} if stage == world.stage_of(LIAR) else {1})
    assert sum(node.core.counts[MicrobatchEvent.REFUSED] for node in world.all_nodes)


@given(SEEDS)
@settings(max_examples=15, deadline=None, phases=PHASES)
def test_one_that_refuses_every_gradient_is_gone_round_and_little_counts_twice(seed):
    """Its word is believed once for each microbatch, then another takes its place."""
    world = world_of(seed, replicas=3)
    world.is_refused = lambda hop: hop.receiver == LIAR and hop.direction is Direction.BACKWARD
    assert world.run(ITERATIONS)
    assert_all_done(world)
    times = times_of(world)
    assert set(times[1]) == set(times[2]) == {1}
    assert set(times[3]) <= {1, 2}


@given(SEEDS)
@settings(max_examples=10, deadline=None, phases=PHASES)
def test_a_stage_that_a_liar_holds_alone_loses_what_passes_it_and_ends(seed):
    world = ChaosWorld(seed, 0, data_peers=1, relays=(2, 1, 2), visited=4)
    world.is_refused = lambda hop: hop.sender == LIAR and hop.direction is Direction.BACKWARD
    assert world.run(ITERATIONS)
    begun = ITERATIONS * world.microbatches
    assert world.ends() == (begun, 0, begun)
    assert world.now_s < ITERATIONS * PATIENCE_S


def test_a_relay_tells_the_data_peer_at_once_who_sent_what_it_refuses():
    relay = RelayCore(4, PATIENCE_S)
    relay.announced("data", 1, 0.0)
    hop = Hop(Microbatch("data", 1, 1), Direction.FORWARD, Path(("before", "relay"), (1, 2)), 2)
    assert relay.offered(1, hop) == [AnswerOffer(1)]
    told = SendNotice(("data",), Lost(hop.microbatch, 0, "before", refused=True))
    assert relay.broke_off(hop, 0.0, refused=True) == [told]
    assert relay.counts[MicrobatchEvent.REFUSED] == 1
