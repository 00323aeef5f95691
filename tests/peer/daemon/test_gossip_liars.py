"""A partner whose vectors cannot be true, again and again: slowed, ignored, and taken back later.

After each such vector the partner rests, for longer each time (protocol/gossip/matchmaking.py), so
that vectors alone slow it and keep it from averaging, and their faults fade before it is ignored.
With what it breaks elsewhere, they have it ignored.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Final

import pytest
import trio
from swarm_worlds import partners, simulated, start, toy_spec
from test_ignored_peers import break_a_rule
from test_poison import poisoned

from peer.averaging.gossip.gossip import Gossip
from peer.observe.event_names import EventName
from protocol.errors import Refused
from protocol.membership.book import HALF_LIFE_S, IGNORED_FROM, SLOWED_S, Fault
from protocol.wire.versions import CONTENT
from simulation.machine import Machine
from simulation.swarm import SimulatedPeer, identity_of, open_swarm
from simulation.trainer import SimulatedSpeed

pytestmark = pytest.mark.slow

SEED: Final = 1
NAMES: Final = "abcd"
LIAR: Final = identity_of(SEED, "d").peer_id
FIRST_LIE: Final = 4
"""Round."""
ROUND: Final = Machine(SimulatedSpeed(step_s=0.5))


def with_a_wrong_digest(own):
    """It is told before the vector comes, and is not that of what comes."""
    return replace(own, digest="ab" * 16)


LIES: Final = {
    Fault.IMPLAUSIBLE: lambda own: poisoned(own, -100.0),
    Fault.BAD_VECTOR: with_a_wrong_digest,
}

FAULTS_UNTIL_SLOWED: Final = {Fault.IMPLAUSIBLE: 3, Fault.BAD_VECTOR: 2}


def wait_s(peer: SimulatedPeer) -> float:
    """For how long a stream of the liar waits there before it is served."""
    return peer.links._reputation.wait_s(LIAR)


def met_after(peer: SimulatedPeer, round_: int) -> set[str]:
    """Its partners in later rounds."""
    return {partner for number, partner in partners(peer).items() if number > round_}


def ignores(peer: SimulatedPeer) -> bool:
    return peer.links._reputation.conduct_refusal_of(LIAR) is not None


@pytest.mark.long
@pytest.mark.parametrize("fault", ["bad_vector", "implausible"])
def test_a_lying_partner_is_slowed_then_ignored_and_taken_back(tmp_path, monkeypatch, fault):
    average, lying = Gossip.average, [True]

    async def lie(gossip, own, **bounds):
        if gossip._matchmaker._own_id == LIAR and own.round >= FIRST_LIE and lying[0]:
            settled = await average(gossip, LIES[fault](own), **bounds)
            return replace(settled, own=own)  # it steps by what it has
        return await average(gossip, own, **bounds)

    monkeypatch.setattr(Gossip, "average", lie)

    @simulated(SEED, limit_s=4 * 3600.0)
    async def run():
        async with open_swarm(SEED, toy_spec(5000, final_averaging=False), tmp_path) as swarm:
            await start(swarm, *NAMES, machine_of=dict.fromkeys(NAMES, ROUND))
            a, liar = swarm["a"], swarm["d"]
            await swarm.until(lambda: wait_s(a) > 0)
            assert wait_s(a) == SLOWED_S
            assert a.facts.faults[fault] == FAULTS_UNTIL_SLOWED[fault]
            assert not ignores(a), "first it is slowed"
            while not ignores(a):  # what it breaks elsewhere counts on top
                with suppress(Refused):
                    assert await break_a_rule(swarm, liar.network, CONTENT) >= SLOWED_S
            lying[0] = False
            (ignored,) = a.events(EventName.PEER_IGNORED)
            assert ignored["remote"] == LIAR
            assert a.facts.faults[Fault.BROKEN_RULE] < IGNORED_FROM, "vectors have counted"
            round_ = a.facts.round
            await swarm.until(lambda: a.facts.round >= round_ + 5)
            assert ignores(a)
            met = met_after(a, round_)
            assert met
            assert LIAR not in met
            await trio.sleep(2 * HALF_LIFE_S)
            assert not ignores(a)
            round_ = a.facts.round
            await swarm.until(lambda: LIAR in met_after(a, round_))
            for peer in (swarm[name] for name in "abc"):
                assert {e["remote"] for e in peer.events(EventName.PEER_IGNORED)} <= {LIAR}

    run()
