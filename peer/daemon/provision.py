"""What a run needs on this machine before it can train: its data, and an engine for it.

The founder finds out once what all others would have to find out too (the corpus's digest, the
tokenizer's, the model's configuration and layout), and freezes it in the run spec, under its
signature. A joiner then needs no file and no hub to know the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from peer.ports import PeerId, Work
from peer.state.held_part import PartShape
from peer.state.service import Fetcher
from peer.training.child_process import SpareChild
from peer.training.corpus.prepare import PreparedCorpus
from peer.training.ports import Float32Vector, TrainerDied
from peer.training.process import create_model
from peer.training.settings import TrainerSettings
from peer.training.tokenizer import tokenizer_path
from protocol.errors import InvalidRunSpec
from protocol.membership.group import WHOLE_MODEL
from protocol.run.run_spec import FrozenSection, RunSpec

from .beginning import Beginning, Fetched, Fresh
from .data import freeze_data, obtain_data
from .engine import Engine, TorchEngine


@dataclass(frozen=True, slots=True)
class Supplies:
    """What a run trains with here.

    Attributes:
        blobs: digest to file, for joiners to fetch from us.
        num_blocks: training blocks of an epoch.
        shape: of the part of the model that the engine trains.
        beginning: where the first state of its group comes from.
        part: which part that is (protocol/membership/group.py).
    """

    engine: Engine
    blobs: Mapping[str, Path]
    num_blocks: int
    shape: PartShape
    beginning: Beginning
    part: str = WHOLE_MODEL


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
        overlap_steps: int | None,
        spare: SpareChild,
    ) -> None:
        self._peer_id = peer_id
        self._cache_dir = cache_dir
        self._state_dir = state_dir
        self._work = work
        self._device = device or "auto"
        self._threads = threads or 0
        self._overlap_steps = overlap_steps
        self._spare = spare

    def __repr__(self) -> str:
        return f"<RealProvision in {self._cache_dir}>"

    async def found(self, spec: RunSpec) -> tuple[RunSpec, Supplies]:
        """Make the corpus and the first weights, and freeze what joiners must know of them."""
        spec, corpus = await freeze_data(spec, self._cache_dir, self._work)
        weights = self._state_dir / "first-weights.f32"
        try:
            layout, config = await create_model(
                self._trainer_settings(spec, corpus), weights, self._spare
            )
        except TrainerDied as died:
            raise InvalidRunSpec(f"the model cannot be made: {died}") from died
        frozen = FrozenSection(
            config=config,
            layout_digest=layout.digest,
            parameters=layout.parameters,
            padded_parameters=layout.padded_parameters,
        )
        spec = spec.model_copy(update={"frozen": frozen})

        async def initialise(slow_P: Float32Vector) -> None:
            slow_P[:] = await self._work.run(np.fromfile, weights, "<f4")
            weights.unlink()

        return spec, self._supplies(spec, corpus, Fresh(initialise))

    async def obtain(self, spec: RunSpec, fetcher: Fetcher) -> Supplies:
        """Take the corpus from here or from a peer."""
        corpus = await obtain_data(spec, self._cache_dir, fetcher, self._work)
        return self._supplies(spec, corpus, Fetched())

    def _supplies(self, spec: RunSpec, corpus: PreparedCorpus, beginning: Beginning) -> Supplies:
        settings = self._trainer_settings(spec, corpus)
        engine = TorchEngine(settings, memory_dir=self._state_dir, spare=self._spare)
        blobs = {corpus.manifest_digest: corpus.path}
        tokenizer = tokenizer_path(self._cache_dir, corpus.tokenizer_digest)
        if tokenizer.is_file():
            blobs[corpus.tokenizer_digest] = tokenizer
        return Supplies(
            engine,
            blobs,
            corpus.num_blocks,
            shape=PartShape.of_whole_model(spec),
            beginning=beginning,
        )

    def _trainer_settings(self, spec: RunSpec, corpus: PreparedCorpus) -> TrainerSettings:
        return TrainerSettings(
            spec=spec.to_bytes(),
            peer_id=self._peer_id,
            corpus_path=str(corpus.path),
            vocabulary_size=corpus.vocabulary_size,
            device=self._device,
            threads=self._threads,
            overlap_steps=self._overlap_steps,
        )
