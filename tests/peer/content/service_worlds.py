"""A source of state and its readers, on the simulated network."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt

from peer.content.fetching import fetch_from
from peer.content.service import ContentService
from peer.content.state_file import StateManifest, write_state
from protocol.content.samples import sample_of
from protocol.limits import STATE_CHUNK_BYTES
from protocol.membership.group import Group
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.wire.content_messages import StateScalars
from simulation.network import SimulatedInternet, SimulatedNetwork
from simulation.swarm import identity_of
from simulation.work import SimulatedWork

P = 3 * STATE_CHUNK_BYTES // 8
FOUNDER = identity_of(1, "founder")
SIGNED = SignedSpec.signed_by(RunSpec(name="toy"), FOUNDER.public_key, FOUNDER.sign)
BLOB = b"a corpus" * 1000
GROUP = Group(SIGNED.run_id).digest
DIGEST = blake3.blake3(BLOB).hexdigest(length=16)


def empty_vectors() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    return np.zeros(P, np.float32), np.zeros(P, np.float32)


class Source:
    """Implements StateSource."""

    group = GROUP

    def __init__(self) -> None:
        self.round, self.step = 4, 250
        self.written_step = 250
        self.writes = 0
        rng = np.random.default_rng(0)
        self.phi_P, self.delta_P = (rng.normal(size=P).astype(np.float32) for _ in range(2))

    async def write(self, directory: Path) -> tuple[Path, StateManifest]:
        self.writes += 1
        path = directory / f"{self.writes}.state"
        scalars = StateScalars(GROUP, self.round, self.written_step, "cd" * 16, 0, 77, 12, 0.5)
        return path, write_state(path, scalars, self.phi_P, self.delta_P)

    async def sample(self, seed: bytes) -> bytes:
        return sample_of(self.phi_P, seed).tobytes()


class World:
    def __init__(self, service: ContentService, source: Source, folder: Path) -> None:
        self.service, self.source, self.folder = service, source, folder
        self.internet: SimulatedInternet
        self.server: SimulatedNetwork
        self.client: SimulatedNetwork

    def fetcher(self, client: SimulatedNetwork | None = None):
        return fetch_from(client or self.client, FOUNDER.peer_id)

    @asynccontextmanager
    async def another(self, name: str, address: str | None = None) -> AsyncIterator[Any]:
        """The network of one more peer, connected to the source."""
        async with self.internet.open_network(identity_of(1, name).peer_id, address) as network:
            await network.connect(FOUNDER.peer_id, self.server.addresses)
            yield network

    @asynccontextmanager
    async def crowd(self, *addresses: str | None) -> AsyncIterator[list[Any]]:
        """The networks of so many more peers."""
        async with AsyncExitStack() as others:
            yield [
                await others.enter_async_context(self.another(f"one of many {number}", address))
                for number, address in enumerate(addresses)
            ]


@asynccontextmanager
async def world(folder: Path, *, with_state: bool = True) -> AsyncIterator[World]:
    internet = SimulatedInternet(1)
    (folder / "blob").write_bytes(BLOB)
    async with (
        internet.open_network(FOUNDER.peer_id) as server,
        internet.open_network(identity_of(1, "joiner").peer_id) as client,
    ):
        service = ContentService(
            network=server,
            work=SimulatedWork(),
            state_dir=folder,
            signed=SIGNED,
            blobs={DIGEST: folder / "blob"},
        )
        made = World(service, Source(), folder)
        made.internet, made.server, made.client = internet, server, client
        if with_state:
            service.source = made.source
        await service.start()
        await client.connect(FOUNDER.peer_id, server.addresses)
        yield made
