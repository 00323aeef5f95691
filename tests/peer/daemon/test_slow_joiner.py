"""In pairs: a joiner on a thin line counts for nothing while it fetches, and gets its state."""

import pytest
from swarm_worlds import partners, simulated, start, tally, toy_spec, weights_bytes

from peer.facts import PeerState
from peer.observe.event_names import EventName
from simulation.machine import Machine
from simulation.network import LinkModel
from simulation.swarm import SwarmOptions, identity_of, open_swarm
from simulation.trainer import SimulatedSpeed

pytestmark = pytest.mark.slow

SEED = 1
PARAMETERS = 1 << 18
WIDE, THIN = (LinkModel(0.02, bandwidth_bytes_per_s=rate) for rate in (2e7, 2.5e4))
JOINER = identity_of(SEED, "d").peer_id
ROUND = Machine(SimulatedSpeed(step_s=0.5))
NUM_ROUNDS_MEANWHILE = 4


def link_of(source: str, destination: str) -> LinkModel:
    return THIN if JOINER in (source, destination) else WIDE


@simulated(SEED)
async def test_a_slow_joiner_contributes_nothing_while_it_fetches_and_is_not_starved(tmp_path):
    options = SwarmOptions(padded_parameters=PARAMETERS, link_of=link_of)
    async with open_swarm(SEED, toy_spec(200, 20), tmp_path, options) as swarm:
        await start(swarm, *"abc", machine_of=dict.fromkeys("abc", ROUND))
        others = [swarm[name] for name in "abc"]
        await swarm.until(lambda: min(peer.facts.round for peer in others) >= 3)
        before = {peer.name: peer.facts.round for peer in others}
        joiner = swarm.join("d", ROUND)
        await swarm.until(joiner.ready.is_set)
        for peer in others:
            assert peer.facts.round >= before[peer.name] + NUM_ROUNDS_MEANWHILE
            assert JOINER not in partners(peer).values()
            assert not peer.events(EventName.PEER_LOST)
            asked_in_vain = [e for e in peer.events(EventName.ROUND_SKIPPED) if e.get("partner")]
            assert JOINER not in {event["partner"] for event in asked_in_vain}
        assert tally(*others)["averaged"] > tally(*others)["no_partner"]
        (received,) = joiner.events(EventName.STATE_RECEIVED)
        opened = joiner.events(EventName.ROUND_OPENED, EventName.ROUND_CLOSED)
        assert all(event["monotonic_s"] >= received["monotonic_s"] for event in opened)
        assert received["bytes"] == weights_bytes(PARAMETERS), "nothing came twice"
        assert received["seconds"] < 2 * weights_bytes(PARAMETERS) / 2.5e4
        await swarm.until(lambda: joiner.facts.state is PeerState.TRAINING)
        await swarm.until(lambda: bool(joiner.events(EventName.ROUND_AVERAGED)))
        assert joiner.failure is None
