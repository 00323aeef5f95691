"""What a run needs on this machine before it can train: its data, and an engine for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from peer.ports import PeerId, Work
from peer.state.service import Fetcher
from peer.training.corpus.prepare import PreparedCorpus
from protocol.run_spec import RunSpec

from .data import freeze_data, obtain_data
from .engine import Engine, TorchEngine


@dataclass(frozen=True, slots=True)
class Supplies:
    """Attributes:
    blobs: digest to file, for joiners to fetch from us.
    """

    engine: Engine
    blobs: Mapping[str, Path]


class Provision(Protocol):
    """Gets a machine ready for a run."""

    async def found(self, spec: RunSpec) -> tuple[RunSpec, Supplies]:
        """The founder's part; returns the spec with its data frozen. Raises InvalidRunSpec."""

    async def obtain(self, spec: RunSpec, fetcher: Fetcher) -> Supplies:
        """A joiner's part. Raises InvalidRunSpec, StreamLost, Refused, RemoteProtocolError."""


class RealProvision:
    """Corpora in the home's cache, torch in child processes."""

    def __init__(
        self,
        *,
        peer_id: PeerId,
        cache_dir: Path,
        state_dir: Path,
        work: Work,
        device: str | None,
        threads: int | None,
    ) -> None:
        self._peer_id = peer_id
        self._cache_dir = cache_dir
        self._state_dir = state_dir
        self._work = work
        self._device = device or "auto"
        self._threads = threads or 0

    def __repr__(self) -> str:
        return f"<RealProvision in {self._cache_dir}>"

    async def found(self, spec: RunSpec) -> tuple[RunSpec, Supplies]:
        """Make the corpus, and name it in the spec."""
        frozen, corpus = await freeze_data(spec, self._cache_dir, self._work)
        return frozen, self._supplies(frozen, corpus)

    async def obtain(self, spec: RunSpec, fetcher: Fetcher) -> Supplies:
        """Take the corpus from here or from a peer."""
        corpus = await obtain_data(spec, self._cache_dir, fetcher, self._work)
        return self._supplies(spec, corpus)

    def _supplies(self, spec: RunSpec, corpus: PreparedCorpus) -> Supplies:
        engine = TorchEngine(
            spec,
            corpus,
            peer_id=self._peer_id,
            device=self._device,
            threads=self._threads,
            state_dir=self._state_dir,
        )
        return Supplies(engine, {corpus.manifest_digest: corpus.path})
