"""Peers that share the pieces of one corpus, on the simulated network."""

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import trio

from peer.content.pieces import PieceFetcher, PieceStore
from peer.content.service import ContentService
from peer.facts import Facts
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.rounds.services import Services
from peer.training.corpus.blocks import Corpus
from peer.training.corpus.folder import KeptCorpus, prepare_corpus
from protocol.membership.view import Progress, Roster
from protocol.run.run_spec import DataSection, ModelSection, RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.schedule.data_plan import DataPlan
from protocol.wire.versions import CONTENT
from simulation.network import LinkModel, SimulatedInternet, SimulatedLink, SimulatedNetwork
from simulation.swarm import identity_of
from simulation.work import SimulatedWork

SPEC = RunSpec(
    model=ModelSection(context_length=64),
    data=DataSection(source="tokens:", validation_blocks=2, piece_kib=16),
)
FOUNDER = identity_of(1, "founder")
SIGNED = SignedSpec.signed_by(SPEC, FOUNDER.public_key, FOUNDER.sign)
FIRST_BLOCKS = 256
NUM_PIECES = 40
USUAL = RunSpec(
    model=ModelSection(context_length=1024),
    data=DataSection(source="tokens:", validation_blocks=2),
)
"""Pieces of 4 MiB."""


def corpus_in(folder: Path, spec: RunSpec = SPEC, num_pieces: int = NUM_PIECES) -> KeptCorpus:
    """A corpus of so many pieces, of 16 KiB if nothing else is said."""
    path = folder / "tokens.npy"
    rng = np.random.default_rng(0)
    size = num_pieces * spec.data.piece_kib * 1024 + 3 * spec.model.context_length + 8
    np.save(path, rng.integers(0, 256, size).astype(np.uint8))
    return prepare_corpus(spec, folder / "founder", f"tokens:{path}")


@dataclass
class PeerOfWorld:
    name: str
    network: SimulatedNetwork
    store: PieceStore
    fetcher: PieceFetcher
    roster: Roster
    facts: Facts
    lines: list[bytes] = field(default_factory=list)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ready: trio.Event = field(default_factory=trio.Event)

    def num_here(self) -> int:
        return int(np.count_nonzero(self.store.here))

    def came_bytes(self) -> int:
        """What has come of pieces and of what others have, kept or not."""
        return self.network.statistics().received_bytes.get(CONTENT, 0)

    def events(self, name: EventName) -> list[dict[str, Any]]:
        """What its event log says under this name."""
        return [line for line in map(json.loads, self.lines) if line["event"] == name]


@dataclass
class World:
    kept: KeptCorpus
    internet: SimulatedInternet
    nursery: trio.Nursery
    folder: Path
    peers: dict[str, PeerOfWorld] = field(default_factory=dict)

    @property
    def plan(self) -> DataPlan:
        return DataPlan(5, self.kept.manifest.num_blocks, self.kept.manifest.piece_blocks)

    def members(self) -> tuple[tuple[str, int], ...]:
        return tuple((identity_of(1, name).peer_id, 4) for name in sorted(self.peers))

    async def add(self, name: str, *, whole: bool = False, max_pieces: float = 1e9) -> PeerOfWorld:
        peer: PeerOfWorld = await self.nursery.start(self._live, name, whole, max_pieces)
        for other in self.peers.values():
            await peer.network.connect(other.network.peer_id, other.network.addresses)
            await other.network.connect(peer.network.peer_id, peer.network.addresses)
            _introduce(peer, other)
            _introduce(other, peer)
        self.peers[name] = peer
        peer.ready.set()
        return peer

    def share_line(self, sources: Iterable[str], destinations: Iterable[str], mbps: float) -> None:
        """Have all that these send to those go over one line."""
        line = SimulatedLink(LinkModel(bandwidth_bytes_per_s=mbps * 125e3), bytes(32))
        for source in sources:
            for destination in destinations:
                ends = identity_of(1, source).peer_id, identity_of(1, destination).peer_id
                self.internet._links[ends] = line

    async def _live(
        self,
        name: str,
        whole: bool,
        max_pieces: float,
        task_status: trio.TaskStatus[PeerOfWorld] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        peer_id = identity_of(1, name).peer_id
        async with self.internet.open_network(peer_id) as network:
            facts, roster, work = Facts(peer_id, 1), Roster(1e9), SimulatedWork()
            store, lines = self._store(name, whole), list[bytes]()
            fetcher = PieceFetcher(
                store,
                self.plan,
                Services(
                    network=network,
                    work=work,
                    roster=roster,
                    facts=facts,
                    events=EventLog(
                        lines.append, peer=peer_id, wall_time_s=lambda: 0.0, stream=None
                    ),
                    sign=identity_of(1, name).sign,
                ),
                first_blocks=FIRST_BLOCKS,
                max_pieces=max_pieces,
            )
            await ContentService(
                network=network,
                work=work,
                state_dir=self.folder,
                signed=SIGNED,
                blobs={},
                stores={store.manifest.name: store},
            ).start()
            peer = PeerOfWorld(name, network, store, fetcher, roster, facts, lines)
            task_status.started(peer)
            await peer.ready.wait()
            with peer.scope:
                await fetcher.run()

    def _store(self, name: str, whole: bool) -> PieceStore:
        if whole:
            corpus = self.kept.open()
            assert isinstance(corpus, Corpus)
            return PieceStore(self.folder, self.kept.manifest, corpus)
        (self.folder / name).mkdir(exist_ok=True)
        return PieceStore(self.folder / name, self.kept.manifest)

    def kill(self, name: str) -> None:
        """It is gone without a word, and the others notice."""
        gone = self.peers.pop(name)
        gone.scope.cancel()
        self.internet.kill(gone.network.peer_id)
        for other in self.peers.values():
            other.roster.gone(gone.network.peer_id, 1)


def _introduce(one: PeerOfWorld, other: PeerOfWorld) -> None:
    one.roster.heard(trio.current_time(), other.network.peer_id, 1, progress=Progress())


@asynccontextmanager
async def world(
    folder: Path, spec: RunSpec = SPEC, num_pieces: int = NUM_PIECES
) -> AsyncIterator[World]:
    kept = corpus_in(folder, spec, num_pieces)
    async with trio.open_nursery() as nursery:
        yield World(kept, SimulatedInternet(1), nursery, folder)
        nursery.cancel_scope.cancel()
