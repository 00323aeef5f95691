"""What only the simulated directory does: latency, nothing shared, being cut off."""

import pytest
import trio
from directory_worlds import ADDRESS, Peer

from peer.network.identity import Identity
from protocol.limits import RECORDS_OF_SHARD
from protocol.membership.records import record_keys
from simulation.network import SimulatedDhtWorld, SimulatedDirectory

KEY = record_keys("run")[0]


async def _swarm(world, num_peers):
    peers = []
    for number in range(num_peers):
        identity = Identity((number + 1).to_bytes(32, "big"))
        peers.append(Peer(identity, SimulatedDirectory(world, identity.peer_id)))
        await peers[-1].directory.add_peers([f"{ADDRESS}/p2p/{peers[0].peer_id}"])
    return peers


async def test_each_finds_itself_alone_where_nothing_is_shared(autojump_clock):
    peers = await _swarm(SimulatedDhtWorld(7, shared=False), 3)
    for peer in peers:
        await peer.announce(KEY)
    assert [[*await peer.directory.get(KEY)] for peer in peers] == [[p.peer_id] for p in peers]


async def test_latency_passes_in_virtual_time(autojump_clock):
    world = SimulatedDhtWorld(1, latency_s=(0.5, 0.5))
    [peer] = await _swarm(world, 1)
    start = trio.current_time()
    await peer.announce(KEY)
    await peer.directory.get(KEY)
    assert trio.current_time() - start == pytest.approx(1.0)


async def test_peers_find_each_other_only_once_they_are_connected(autojump_clock):
    world = SimulatedDhtWorld(1)
    first, second = (
        Peer(identity, SimulatedDirectory(world, identity.peer_id))
        for identity in (Identity(bytes([n]) * 32) for n in (1, 2))
    )
    await first.announce(KEY)
    assert await second.directory.get(KEY) == {}
    await second.directory.add_peers([f"{ADDRESS}/p2p/{first.peer_id}"])
    assert set(await second.directory.get(KEY)) == {first.peer_id}


async def test_a_peer_that_is_cut_off_finds_nothing_after_a_while(autojump_clock):
    first, second = await _swarm(SimulatedDhtWorld(1), 2)
    await first.announce(KEY)
    second.directory.online = False
    start = trio.current_time()
    assert await second.directory.get(KEY) == {}
    assert trio.current_time() - start == pytest.approx(4.0)
    second.directory.online = True
    assert set(await second.directory.get(KEY)) == {first.peer_id}


async def test_a_shard_is_bounded(autojump_clock):
    peers = await _swarm(SimulatedDhtWorld(1), RECORDS_OF_SHARD.total + 3)
    for peer in peers:
        await peer.announce(KEY)
    assert len(await peers[0].directory.get(KEY)) == RECORDS_OF_SHARD.total
    assert sum(peer.directory.refused for peer in peers) == 3
