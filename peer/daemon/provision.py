"""What a run needs on this machine before it can train: its data, and an engine for it.

The founder finds out once what all others would have to find out too (the corpus's digest, the
tokenizer's, the model's configuration and layout), and freezes it in the run spec, under its
signature. A joiner then needs no file and no hub to know the model.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from peer.corpus.store import PieceStore, open_store
from peer.ports import PeerId, Work
from peer.state.fetching import BlobSource
from peer.state.held_part import PartShape
from peer.training.child_process import SpareChild
from peer.training.corpus import PreparedCorpus
from peer.training.corpus.tokenizer import tokenizer_path
from peer.training.messages import ModelCreated, TrainerSettings
from peer.training.ports import Float32Vector, TrainerDied
from peer.training.process import create_model
from protocol.errors import InvalidRunSpec
from protocol.membership.group import WHOLE_MODEL
from protocol.run.run_spec import FrozenSection, RunSpec
from protocol.run.stages import DATA_STAGE, part_of_stage, stage_layouts

from .beginning import Beginning, Fetched, Fresh
from .data import freeze_data, obtain_data
from .engine import Engine, TorchEngine
from .rebuilding import Rebuilt


@dataclass(frozen=True, slots=True)
class Supplies:
    """What a run trains with here.

    Attributes:
        blobs: digest to file, for joiners to fetch from us.
        num_blocks: training blocks of an epoch.
        piece_blocks: of them in one piece of the corpus; None where it is all one.
        store: the pieces that are here; None where the corpus has none.
        remake: makes the first weights of the run again, as its founder made them.
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
    piece_blocks: int | None = None
    store: PieceStore | None = None
    remake: Callable[[], Awaitable[Beginning]] | None = None


@dataclass(frozen=True, slots=True)
class ChosenStage:
    """The stage of a pipeline that we are to hold.

    Attributes:
        has_holders: whether others hold it, or are about to.
        is_trained: whether the run has been trained already.
    """

    stage: int
    has_holders: bool
    is_trained: bool


ChooseStage = Callable[[], Awaitable[ChosenStage]]
"""Looks around, and chooses."""


class Provision(Protocol):
    """Gets a machine ready for a run."""

    async def found(self, spec: RunSpec) -> tuple[RunSpec, Supplies]:
        """The founder's part; returns the spec with its data frozen.

        Raises:
            InvalidRunSpec, HomeError
        """

    async def obtain(
        self, spec: RunSpec, source: BlobSource, choose_stage: ChooseStage
    ) -> Supplies:
        """A joiner's part.

        Raises:
            InvalidRunSpec, HomeError, StreamLost, Refused, RemoteProtocolError
        """


class RealProvision:
    """Corpora in the home's cache, torch in child processes.

    Args:
        data: where this machine has the corpus, if its user has said so.
    """

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
        checkpoint_activations: bool,
        spare: SpareChild,
        data: str | None = None,
    ) -> None:
        self._peer_id = peer_id
        self._cache_dir = cache_dir
        self._state_dir = state_dir
        self._work = work
        self._device = device or "auto"
        self._threads = threads or 0
        self._overlap_steps = overlap_steps
        self._checkpoint_activations = checkpoint_activations
        self._spare = spare
        self._data = data

    async def found(self, spec: RunSpec) -> tuple[RunSpec, Supplies]:
        """Make the corpus and the first weights, and freeze what joiners must know of them."""
        spec, corpus = await freeze_data(spec, self._cache_dir, self._work, self._data)
        stage = DATA_STAGE if spec.pipeline.stages > 1 else None
        created, fresh = await self._first_weights(spec, corpus, stage)
        frozen = FrozenSection(
            config=created.config,
            layout_digest=created.whole.digest,
            parameters=created.whole.parameters,
            padded_parameters=created.whole.padded_parameters,
        )
        spec = spec.model_copy(update={"frozen": frozen})
        return spec, self._supplies(spec, corpus, _shape(created), fresh, stage)

    async def obtain(
        self, spec: RunSpec, source: BlobSource, choose_stage: ChooseStage
    ) -> Supplies:
        """Take the corpus from here or from a peer; of a pipeline, the stage that needs us most."""
        corpus = await obtain_data(spec, self._cache_dir, source, self._work, self._data)
        if spec.pipeline.stages == 1:
            shape = PartShape.of_whole_model(spec)
            supplies = self._supplies(spec, corpus, shape, Fetched(), None)
            return replace(supplies, remake=partial(self._remade, spec, corpus))
        chosen = await choose_stage()
        created, fresh = await self._first_weights(spec, corpus, chosen.stage)
        beginning: Beginning = fresh
        if chosen.has_holders:
            beginning = Fetched()
        elif chosen.is_trained:
            layouts = stage_layouts(created.whole, spec.pipeline.stages)
            beginning = Rebuilt(chosen.stage, fresh, layouts)
        return self._supplies(spec, corpus, _shape(created), beginning, chosen.stage)

    async def _remade(self, spec: RunSpec, corpus: PreparedCorpus) -> Beginning:
        """The first weights once more; where the run began from a checkpoint, from that."""
        assert spec.frozen is not None
        unfrozen = spec.model_copy(update={"frozen": None})
        created, fresh = await self._first_weights(unfrozen, corpus, None)
        if created.whole.digest != spec.frozen.layout_digest:
            raise InvalidRunSpec(
                f"{spec.model.init_from} has another layout than when this run was founded, and"
                " this home has no checkpoint of it; found a new run: --new-run"
            )
        return fresh

    async def _first_weights(
        self, spec: RunSpec, corpus: PreparedCorpus, stage: int | None
    ) -> tuple[ModelCreated, Fresh]:
        """The initialisation of the part that we hold, and a beginning with it."""
        weights = self._state_dir / "first-weights.f32"
        settings = self._trainer_settings(spec, corpus, stage)
        try:
            created = await create_model(settings, weights, self._spare)
        except TrainerDied as died:
            weights.unlink(missing_ok=True)
            where = f"its first weights go into {self._state_dir}"
            raise InvalidRunSpec(f"the model cannot be made ({where}): {died}") from died

        async def initialise(slow_P: Float32Vector) -> None:
            slow_P[:] = await self._work.run(np.fromfile, weights, "<f4")
            weights.unlink()

        return created, Fresh(initialise)

    def _supplies(
        self,
        spec: RunSpec,
        corpus: PreparedCorpus,
        shape: PartShape,
        beginning: Beginning,
        stage: int | None,
    ) -> Supplies:
        settings = self._trainer_settings(spec, corpus, stage)
        engine = TorchEngine(settings, memory_dir=self._state_dir, spare=self._spare)
        blobs = corpus.blobs
        tokenizer = tokenizer_path(self._cache_dir, corpus.tokenizer_digest)
        if tokenizer.is_file():
            blobs[corpus.tokenizer_digest] = tokenizer
        return Supplies(
            engine,
            blobs,
            corpus.num_blocks,
            shape=shape,
            beginning=beginning,
            part=WHOLE_MODEL if stage is None else part_of_stage(stage),
            piece_blocks=corpus.kept.manifest.piece_blocks,
            store=open_store(corpus.kept),
        )

    def _trainer_settings(
        self, spec: RunSpec, corpus: PreparedCorpus, stage: int | None
    ) -> TrainerSettings:
        return TrainerSettings(
            spec=spec.to_bytes(),
            peer_id=self._peer_id,
            corpus_path=str(corpus.path),
            vocabulary_size=corpus.vocabulary_size,
            device=self._device,
            threads=self._threads,
            overlap_steps=self._overlap_steps,
            stage=stage,
            checkpoint_activations=self._checkpoint_activations,
        )


def _shape(created: ModelCreated) -> PartShape:
    return PartShape(created.layout.digest, created.layout.padded_parameters)
