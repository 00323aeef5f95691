"""A real directory under siege: p2pd, the shared table, and a peer that asks and answers wrongly.

Two honest peers keep records and look for each other's, while a hostile one puts drawn questions to
both, and answers theirs with drawn answers. What ends a stream and was not expected is counted, and
a table that a bug has ended is begun anew: both are findings, as is a record that is found no more.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from peer.network.directory import SharedTable, open_directory
from peer.network.identity import Identity
from peer.network.libp2p import Libp2pNetwork, open_libp2p_network
from protocol.membership.records import PeerRecord, encode_record, place_of, record_key
from protocol.wire.versions import DIRECTORY

from .hostile import Hostile
from .shots import Gunner, Magazine
from .swarms import FoundBug
from .values import World

READER, WRITER, LIAR = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
LIFETIME_S: Final = 1800.0
FOUND_S: Final = 60.0


async def besieged_directory(folder: Path, examples: int, pool: int, seed: int) -> Counter[str]:
    """Play it. How many messages of each type were fired; raises FoundBug."""
    bug = ""
    async with (
        _network(folder, READER) as reader,
        _network(folder, WRITER) as writer,
        _network(folder, LIAR) as liar,
    ):
        reads, writes = await open_directory(reader), await open_directory(writer)
        honest = {peer.peer_id: peer.addresses for peer in (reader, writer)}
        for peer in (reader, writer):
            await peer.connect(LIAR.peer_id, liar.addresses)
        await writer.connect(READER.peer_id, reader.addresses)
        await writes.add_peers(reader.addresses)
        world = _world(writes.swarm_time_s() + LIFETIME_S)
        magazine = Magazine(world, (DIRECTORY,), pool, seed)
        hostile = Hostile(liar, honest, magazine=magazine, gunner=Gunner(LIAR, world, seed))
        async with trio.open_nursery() as nursery:
            for directory in (reads, writes):
                nursery.start_soon(_use, directory, liar.addresses)
            await hostile.attack(magazine.volleys(examples), linked=False, asked=True)
            nursery.cancel_scope.cancel()
        failed = sum(peer.statistics().failed_streams for peer in (reader, writer))
        ended = reads.restarts + writes.restarts
        if failed or ended or not await _finds(reads, writes):
            bug = f"{failed} streams failed, {ended} tables ended, or a record was lost"
    if bug:
        raise FoundBug(f"{bug}\n{hostile.last_words()}")
    return hostile.fired


@asynccontextmanager
async def _network(folder: Path, identity: Identity) -> AsyncIterator[Libp2pNetwork]:
    key_file = folder / identity.peer_id[-8:]
    key_file.write_bytes(identity.to_file_bytes())
    key_file.chmod(0o600)
    async with open_libp2p_network(key_file, runtime_dir=folder) as network:
        yield network


def _record(identity: Identity, expires_s: float) -> tuple[bytes, bytes]:
    """Its key, and a value that is right."""
    key = record_key("group", identity.peer_id)
    record = PeerRecord(identity.peer_id, 1, ("/ip4/127.0.0.1/tcp/9",), expires_s)
    return key, encode_record(record, key, identity.sign)


def _world(expires_s: float) -> World:
    identities = (READER, WRITER, LIAR)
    keys, values = zip(*(_record(each, expires_s) for each in identities), strict=True)
    named = {
        "place": tuple(map(place_of, keys)),
        "value": values,
        "peer_id": tuple(each.peer_id for each in identities),
    }
    return World((), named)


async def _use(directory: SharedTable, liar: Sequence[str]) -> None:
    """Ask others, the liar among them, again and again."""
    while True:
        await directory.add_peers(liar)
        await _store(directory)
        await directory.get(_record(WRITER, LIFETIME_S)[0])


async def _store(directory: SharedTable) -> tuple[bytes, bytes]:
    """Store the writer's record; whoever is asked by the reader takes it for another's."""
    key, value = _record(WRITER, directory.swarm_time_s() + LIFETIME_S)
    await directory.store(key, value)
    return key, value


async def _finds(reads: SharedTable, writes: SharedTable) -> bool:
    """Whether what one stores is found by the other, soon."""
    key, value = await _store(writes)
    with trio.move_on_after(FOUND_S):
        while True:
            if (await reads.get(key)).get(WRITER.peer_id) == value:
                return True
            await trio.sleep(0.1)
    return False
