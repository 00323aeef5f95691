"""A peer that breaks the protocol again and again is ignored for a while; others are not."""

import math

import pytest
import trio
from swarm_worlds import simulated, start, toy_spec
from test_admission import beat, greet

from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from peer.runtime import Network
from protocol.errors import LocoError, Refused
from protocol.membership.book import HALF_LIFE_S, IGNORED_FROM, SLOWED_S, Fault
from protocol.outcomes import RefusalReason
from protocol.wire.messages import Leaving
from protocol.wire.versions import CONTENT, GOSSIP
from simulation.machine import Machine
from simulation.swarm import SimulatedSwarm, identity_of, open_swarm
from simulation.trainer import SimulatedSpeed

pytestmark = pytest.mark.slow

SEED = 1
SLOW = Machine(SimulatedSpeed(step_s=10.0))
NUM_FAULTS = math.ceil(IGNORED_FROM)


async def break_a_rule(swarm: SimulatedSwarm, network: Network, protocol: str) -> float:
    """Send what nobody expects; how long it took until the stream ended."""
    began_s = trio.current_time()
    talk = Conversation(await network.open_stream(swarm["a"].peer_id, protocol))
    try:
        await talk.send(Leaving())
        await talk.receive(Leaving, timeout_s=30.0)
    except Refused:
        raise
    except LocoError:
        return trio.current_time() - began_s
    finally:
        await talk.aclose()
    raise AssertionError("the stream went on")


@simulated(SEED)
async def test_it_is_slowed_then_ignored_and_comes_back(tmp_path):
    async with open_swarm(SEED, toy_spec(100), tmp_path) as swarm:
        await start(swarm, *"ab", machine_of=dict.fromkeys("ab", SLOW))
        a, liar = swarm["a"], identity_of(SEED, "liar").peer_id
        async with swarm.internet.open_network(liar) as network, trio.open_nursery() as nursery:
            talk, _ = await greet(swarm, network)
            nursery.start_soon(beat, talk)
            took_s = [
                await break_a_rule(swarm, network, (CONTENT, GOSSIP)[number % 2])
                for number in range(NUM_FAULTS)
            ]
            assert max(took_s[:3]) < SLOWED_S <= min(took_s[3:])
            assert a.facts.faults == {Fault.BROKEN_RULE: NUM_FAULTS}
            (ignored,) = a.events(EventName.PEER_IGNORED)
            assert (ignored["remote"], ignored["fault"]) == (liar, "broken_rule")
            await swarm.until(lambda: a.links.num_live == 1)
            for protocol in (CONTENT, GOSSIP):
                with pytest.raises(Refused) as refused:
                    await break_a_rule(swarm, network, protocol)
                assert refused.value.reason is RefusalReason.IGNORED
            with pytest.raises(Refused) as refused:
                await greet(swarm, network)
            assert refused.value.reason is RefusalReason.IGNORED
            assert b'loco_peer_faults_total{fault="broken_rule"} 8.0' in a.report.metrics.render()
            nursery.cancel_scope.cancel()
        await trio.sleep(2 * HALF_LIFE_S)
        async with swarm.internet.open_network(liar) as network:
            await greet(swarm, network)
        assert not swarm["b"].events(EventName.PEER_IGNORED), "what a has seen moves nobody else"
