"""Swarms of directories for the tests: in memory, or on real p2pd processes on loopback."""

import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from peer.network.directory import open_directory
from peer.network.identity import Identity
from peer.network.libp2p import open_libp2p_network
from protocol.membership.records import PeerRecord, encode_record
from simulation.network import SimulatedDhtWorld, SimulatedDirectory

ADDRESS = "/ip4/203.0.113.5/tcp/4001"


@dataclass
class Peer:
    identity: Identity
    directory: Any
    network: Any = None

    @property
    def peer_id(self):
        return self.identity.peer_id

    def value(self, key, expires_s, incarnation=1):
        record = PeerRecord(self.peer_id, incarnation, (ADDRESS,), expires_s)
        return encode_record(record, key, self.identity.sign)

    async def announce(self, key, lifetime_s=60.0, incarnation=1):
        expires_s = self.directory.swarm_time_s() + lifetime_s
        value = self.value(key, expires_s, incarnation)
        await self.directory.store(key, value)
        return value


class SimulatedWorld:
    def __init__(self):
        self._dht = SimulatedDhtWorld(seed=1)
        self._first = None

    async def peer(self, number, clock_skew_s=0.0):
        identity = Identity(bytes([number]) * 32)
        directory = SimulatedDirectory(self._dht, identity.peer_id, clock_skew_s)
        if self._first:
            await directory.add_peers([f"{ADDRESS}/p2p/{self._first}"])
        self._first = self._first or identity.peer_id
        return Peer(identity, directory)


class RealWorld:
    """Peers with a p2pd of their own, on loopback."""

    def __init__(self, folder, nursery):
        self._folder, self._nursery = folder, nursery
        self._first = None

    async def network(self, number, **options):
        """A network with the identity of this number, which has dialled the first one."""
        identity = Identity(bytes([number]) * 32)
        key_file = self._folder / f"identity{number}"
        key_file.write_bytes(identity.to_file_bytes())
        opened = open_libp2p_network(key_file, runtime_dir=self._folder, **options)
        network = await self._nursery.start(hold, opened)
        if self._first:
            await network.connect(self._first.peer_id, self._first.addresses)
        return identity, network

    async def peer(self, number, clock_skew_s=0.0):
        identity, network = await self.network(number)
        directory = await open_directory(network, lambda: time.time() + clock_skew_s)
        if self._first:
            await directory.add_peers(self._first.addresses)
        self._first = self._first or network
        return Peer(identity, directory, network)


async def hold(opened, task_status):
    """Keep it open, in a task of its own, until the world ends."""
    async with opened as held:
        task_status.started(held)
        await trio.sleep_forever()


@asynccontextmanager
async def real_world(tmp_path_factory):
    async with trio.open_nursery() as nursery:
        yield RealWorld(tmp_path_factory.mktemp("d", numbered=True), nursery)
        nursery.cancel_scope.cancel()


async def eventually(condition, timeout_s=60.0):
    """The first truthy answer of an async condition."""
    with trio.fail_after(timeout_s):
        while not (answer := await condition()):
            await trio.sleep(0.02)
    return answer
