"""A joiner does not take a state that is unlike those of the others, whatever its source says."""

import numpy as np
import pytest
from swarm_worlds import simulated, start, toy_spec

from peer.content.fetching import ContentClient
from peer.observe.event_names import EventName
from protocol.content.samples import SAMPLE_BYTES, is_unlike, sample_from, sample_of
from protocol.errors import RemoteProtocolError
from simulation.machine import Machine
from simulation.swarm import SimulatedPeer, open_swarm
from simulation.trainer import SimulatedSpeed

pytestmark = pytest.mark.slow

SEED = 1
SLOW = Machine(SimulatedSpeed(step_s=1.0))


def source_of(peer: SimulatedPeer) -> str:
    (received,) = peer.events(EventName.STATE_RECEIVED)
    return str(received["remotes"][0])


def spoil(peer: SimulatedPeer, factor: float) -> None:
    """Its outer copy is another from now on; what it says of it goes on being true."""
    assert peer.provision.slow_P is not None
    peer.provision.slow_P *= factor


@pytest.mark.parametrize("factor", [-1.0, 10.0])
def test_a_state_that_is_unlike_all_others_is_not_taken(tmp_path, monkeypatch, factor):
    """The peer that the joiner asks first lies about all its weights."""
    description = ContentClient.description

    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, toy_spec(200), tmp_path) as swarm:
            await start(swarm, *"abc", machine_of=dict.fromkeys("abc", SLOW))
            peers = {swarm[name].peer_id: swarm[name] for name in "abc"}
            asked: list[str] = []

            async def lie(fetcher, expected, size):
                if not asked:
                    spoil(peers[fetcher.remote_peer_id], factor)
                asked.append(fetcher.remote_peer_id)
                return await description(fetcher, expected, size)

            monkeypatch.setattr(ContentClient, "description", lie)
            swarm.join("d", SLOW)
            await swarm.until(swarm["d"].ready.is_set)
            assert source_of(swarm["d"]) == asked[1] != asked[0]

    run()


@pytest.mark.parametrize("honest", [False, True])
def test_a_state_that_is_like_the_others_and_has_a_far_higher_loss_is_not_taken(
    tmp_path, monkeypatch, honest
):
    """Samples see nothing, as of a lie about few weights; the loss on held-out blocks does."""
    monkeypatch.setattr("peer.daemon.fetched.is_unlike", lambda sample, witnesses: False)
    description = ContentClient.description

    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, toy_spec(200), tmp_path) as swarm:
            await start(swarm, *"abc", machine_of=dict.fromkeys("abc", SLOW))
            peers = {swarm[name].peer_id: swarm[name] for name in "abc"}
            await swarm.until(lambda: all(p.events(EventName.VALIDATED) for p in peers.values()))
            asked: list[str] = []

            async def lie(fetcher, expected, size):
                if not asked and not honest:
                    spoil(peers[fetcher.remote_peer_id], -3.0)
                asked.append(fetcher.remote_peer_id)
                return await description(fetcher, expected, size)

            monkeypatch.setattr(ContentClient, "description", lie)
            swarm.join("d", SLOW)
            await swarm.until(swarm["d"].ready.is_set)
            assert source_of(swarm["d"]) == asked[0 if honest else 1]
            assert (asked[0] == asked[-1]) == honest

    run()


@simulated(SEED)
async def test_of_two_peers_nobody_can_tell_which_one_lies(tmp_path):
    async with open_swarm(SEED, toy_spec(200), tmp_path) as swarm:
        await start(swarm, *"ab", machine_of=dict.fromkeys("ab", SLOW))
        spoil(swarm["a"], 10.0)
        swarm.join("c", SLOW)
        await swarm.until(swarm["c"].ready.is_set)


def test_samples_of_another_length_or_without_numbers_are_refused():
    values = np.ones(SAMPLE_BYTES // 4, np.float32)
    assert (sample_from(values.tobytes()) == values).all()
    with pytest.raises(RemoteProtocolError, match="of 8 bytes"):
        sample_from(bytes(8))
    values[7] = np.nan
    with pytest.raises(RemoteProtocolError, match="not finite"):
        sample_from(values.tobytes())


def test_replicas_are_alike_and_a_flipped_one_is_not():
    vector = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
    noise = np.random.default_rng(1).standard_normal((3, 1 << 16), np.float32)
    witnesses = [sample_of(vector + 0.1 * noise[n], bytes(16)) for n in range(2)]
    assert not is_unlike(sample_of(vector + 0.1 * noise[2], bytes(16)), witnesses)
    assert is_unlike(sample_of(-vector, bytes(16)), witnesses)
    assert not is_unlike(sample_of(-vector, bytes(16)), witnesses[:1])
