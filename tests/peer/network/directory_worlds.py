"""Swarms of directories for the tests: in memory, or on real p2pd processes on loopback."""

import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from peer.network.directory import open_hivemind_directory
from peer.network.identity import Identity
from peer.network.p2pd import P2pdConfig, P2pdProcess, attach, held_ports, run_p2pd
from peer.network.simulated import SimulatedDhtWorld
from protocol.membership.records import PeerRecord, encode_record

ADDRESS = "/ip4/203.0.113.5/tcp/4001"


@dataclass
class Peer:
    identity: Identity
    directory: Any
    world: Any

    @property
    def peer_id(self):
        return self.identity.peer_id

    def value(self, key, expires_s, incarnation=1):
        record = PeerRecord(self.peer_id, incarnation, (ADDRESS,), expires_s)
        return encode_record(record, key, self.identity.sign)

    async def announce(self, key, lifetime_s=60.0, incarnation=1):
        expires_s = self.directory.swarm_time_s() + lifetime_s
        value = self.value(key, expires_s, incarnation)
        await self.directory.store(key, self.peer_id, value, expires_s)
        return value


class SimulatedWorld:
    def __init__(self):
        self._dht = SimulatedDhtWorld(seed=1)
        self._first = None

    async def peer(self, number, clock_skew_s=0.0):
        identity = Identity(bytes([number]) * 32)
        directory = self._dht.directory(identity.peer_id, clock_skew_s)
        if self._first:
            await directory.add_peers([f"{ADDRESS}/p2p/{self._first}"])
        self._first = self._first or identity.peer_id
        return Peer(identity, directory, self)


@dataclass
class Daemon:
    """A p2pd with what the network would hold of it."""

    process: P2pdProcess
    control_address: str
    peer: bytes
    addresses: tuple[bytes, ...]
    client: Any
    life: Any


class RealWorld:
    def __init__(self, folder, nursery, stack):
        self.folder, self._nursery, self._stack = folder, nursery, stack
        self.daemons = {}
        self._first = None

    async def start_p2pd(self, number):
        identity = Identity(bytes([number]) * 32)
        key_file = self.folder / f"identity{number}"
        key_file.write_bytes(identity.to_file_bytes())
        control = self.folder / f"c{number}"
        life = AsyncExitStack()
        await self._stack.enter_async_context(life)
        listen = life.enter_context(held_ports(("/ip4/127.0.0.1/tcp/0",)))
        config = P2pdConfig(key_file, control, listen)
        process = await life.enter_async_context(run_p2pd(config))
        client = await life.enter_async_context(attach(control))
        here = await client.identify()
        daemon = Daemon(process, f"/unix{control}", here.peer, here.addresses, client, life)
        if self.daemons and number != min(self.daemons):
            first = self.daemons[min(self.daemons)]
            await client.connect(first.peer, first.addresses)
        self.daemons[number] = daemon
        return identity, daemon

    async def peer(self, number, clock_skew_s=0.0):
        identity, daemon = await self.start_p2pd(number)
        directory = await self._stack.enter_async_context(
            open_hivemind_directory(
                daemon.control_address,
                wall_clock=lambda: time.time() + clock_skew_s,
            )
        )
        if self._first:
            await directory.add_peers([f"{ADDRESS}/p2p/{self._first}"])
        self._first = self._first or identity.peer_id
        return Peer(identity, directory, self)


@asynccontextmanager
async def real_world(tmp_path_factory):
    folder = Path(tmp_path_factory.mktemp("d", numbered=True))
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        yield RealWorld(folder, nursery, stack)


async def eventually(condition, timeout_s=10.0):
    """The first truthy answer of an async condition."""
    with trio.fail_after(timeout_s):
        while not (answer := await condition()):
            await trio.sleep(0.02)
    return answer
