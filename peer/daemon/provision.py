"""The needs of a run on this machine before it trains: its data, its engine, a first state.

The founder finds out once what all others would have to find out too (the corpus's digest, the
tokenizer's, the model's configuration and layout), and freezes it in the run spec, under its
signature. A joiner then needs no file and no hub to know the model.

A joiner first looks whether its own machine has the very same corpus: in the cache, in what its
user names with `--data`, or made from the standard library of the same Python. If not, it takes the
manifest and the held-out blocks from the swarm; pieces come while it trains (peer/content). Either
way the corpus is the one that the run spec names by digest.

A stage that all its peers have left while the run was trained is rebuilt from the weights of its
neighbours (peer/state/rebuilt_stage.py), and all are told so. The step is that of the peers that
train: they wait for this stage, and go on with it from where they are.

The engine is memory and trainers, without torch: the real one starts child processes
(peer/training/process.py); a simulation puts a toy model in its place.
"""

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch
import trio

from peer.content.fetching import BlobSource
from peer.content.pieces import PieceStore, open_store
from peer.facts import PartShape
from peer.observe.event_names import EventName
from peer.options.config import PeerConfig
from peer.options.needs_told import FreeRoom, misfit
from peer.rounds.domains import HeldOut, HeldOutBlocks
from peer.runtime import PeerId, Work
from peer.runtime.files import replace_file
from peer.state.home import Home, HomeError
from peer.state.rebuilt_stage import Neighbour, rebuild
from peer.training.child_process import SpareChild
from peer.training.corpus.child import prepare_in_child
from peer.training.corpus.folder import (
    KeptCorpus,
    describe_corpus,
    document_end,
    kept_corpus,
    prepare_corpus,
)
from peer.training.corpus.packed import InvalidCorpus
from peer.training.corpus.tokenise import remove_all_drafts
from peer.training.corpus.tokenizer import BYTES, FileTokenizer, tokenizer_file, tokenizer_path
from peer.training.device import choose_device, devices_of
from peer.training.messages import ModelCreated, TrainerSettings
from peer.training.ports import StartTrainer, TrainerDied
from peer.training.process import create_model, trainer_starter
from peer.training.shared import SharedVector
from protocol.content.samples import Float32Vector
from protocol.errors import InvalidRunSpec
from protocol.experts.claims import claimed_blocks
from protocol.membership.group import WHOLE_MODEL, Group
from protocol.membership.view import View, known_positions, trusted
from protocol.run.layout import DATA_STAGE, Layout, part_of_expert, part_of_stage, stage_layouts
from protocol.run.run_spec import FrozenSection, RunSpec, validated
from protocol.schedule.progress import TaskProgress, Tell, nobody
from protocol.schedule.rounds import middle

from .beginning import Beginning, FirstState, Fresh, StartContext
from .checkpointing import free_bytes
from .domains import Domains, described_corpus
from .expert_beginning import FreshOrFetched, FromFounder
from .fetched import FromPeers
from .kept_experts import digest_of_weights, kept_first_weights, weights_file
from .sources import NoSource, Weights, weights_of

# --- memory and trainers --------------------------------------------------------------------------


Engine = Callable[[int], AbstractContextManager[tuple[Float32Vector, StartTrainer]]]
"""Memory for slow weights of so many padded parameters, and what starts trainers on them."""


@contextmanager
def torch_engine(
    settings: TrainerSettings, spare: SpareChild, padded_parameters: int
) -> Iterator[tuple[Float32Vector, StartTrainer]]:
    """Shared memory, and child processes with torch; `spare` is for the first trainer."""
    with SharedVector(padded_parameters) as slow:
        yield slow.array, trainer_starter(settings, slow, spare)


# --- rebuilding -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rebuilt:
    """A stage that is rebuilt from its neighbours.

    Args:
        first: the model's first weights, for what no neighbour resembles.
        layouts: of all stages.
    """

    goes_stale = True
    stage: int
    first: Fresh
    layouts: tuple[Layout, ...]

    async def take(self, context: StartContext) -> FirstState:
        await self.first.take(context)
        found: list[tuple[PeerId, Neighbour]] = []
        beside = (self.stage - 1, self.stage + 1)
        for stage in (each for each in beside if 0 <= each < len(self.layouts)):
            given = await self._fetch(stage, context)
            if given is not None:
                remote, slow_P, state = given
                neighbour = Neighbour(self.layouts[stage], slow_P, state.gradient_norm)
                found.append((remote, neighbour))
        own = self.layouts[self.stage]
        kept = [entry.name for entry in own.entries]
        if found:
            neighbours = [neighbour for _, neighbour in found]
            kept = rebuild(own, context.slow_P, neighbours)
        context.services.events.emit(
            EventName.STAGE_REBUILT,
            stage=self.stage,
            remotes=[remote for remote, _ in found],
            untrained=kept,
        )
        return where_others_are(context)

    async def _fetch(self, stage: int, context: StartContext) -> Weights | None:
        """A neighbour's weights; None where nobody holds it, or gives it in time."""
        group = Group(context.held.group.run_id, part_of_stage(stage)).digest
        view = View(context.services.roster, group)
        context.services.facts.now_doing(f"rebuilding stage {self.stage}: fetching stage {stage}")
        return await weights_of(context.sources, view, self.layouts[stage].padded_parameters)


def where_others_are(context: StartContext) -> FirstState:
    """The position of peers that hold other stages: the median of their steps, and of the data."""
    now_s, spec = trio.current_time(), context.spec
    others = context.services.roster.alive(now_s)
    told = [member.progress.step for member in trusted(others, now_s)]
    steps = [step for step in told if step <= spec.longest_steps]
    epoch, position = context.plan.start_position(known_positions(others, now_s))
    step = int(middle(steps, 0))
    return FirstState(step // spec.founding.sync.round_steps - 1, step, epoch, position)


# --- experts --------------------------------------------------------------------------------------
def with_frozen_experts(spec: RunSpec, frozen: Sequence[RunSpec]) -> RunSpec:
    """A run with what its founder found out of each expert."""
    experts = tuple(
        expert.model_copy(update={"manifest": of.data.manifest, "frozen": of.frozen})
        for expert, of in zip(spec.experts, frozen, strict=True)
    )
    return spec.model_copy(update={"data": frozen[0].data, "experts": experts})


# --- data -----------------------------------------------------------------------------------------


async def freeze_data(
    spec: RunSpec, cache_dir: Path, work: Work, data: str | None = None, tell: Tell = nobody
) -> tuple[RunSpec, KeptCorpus]:
    """Make the corpus, and name it in the run spec by digest; `data` is a source of our own.

    Raises:
        InvalidRunSpec: the data the spec names cannot be used.
        HomeError: the cache cannot be written.
    """
    with _told(cache_dir):
        await work.run(remove_all_drafts, cache_dir)
        corpus = await _made(spec, cache_dir, data, work, tell)
        await work.run(_keep_tokenizer, spec.data.tokenizer, cache_dir)
    digest = corpus.manifest.tokenizer_digest
    frozen: dict[str, Any] = {"manifest": corpus.manifest_digest, "tokenizer_digest": digest}
    if spec.data.mask_documents:
        with _told(cache_dir):
            frozen["document_end"] = await work.run(document_end, spec, corpus)
    section = spec.data.model_copy(update=frozen)
    return spec.model_copy(update={"data": section}), corpus


async def obtain_data(
    spec: RunSpec,
    cache_dir: Path,
    source: BlobSource,
    work: Work,
    data: str | None = None,
    tell: Tell = nobody,
) -> KeptCorpus:
    """The corpus that the run spec names, from here or from peers; `data` is a source of our own.

    Raises:
        InvalidRunSpec: the spec names no corpus, or one that does not fit it.
        HomeError: the cache cannot be written.
        StreamLost, Refused, RemoteProtocolError: the peer could not give it.
    """
    digest, tokenizer = spec.data.manifest, spec.data.tokenizer_digest
    if digest is None or tokenizer is None:
        raise InvalidRunSpec("the run spec does not name its corpus and tokenizer by digest")
    with _told(cache_dir):
        await work.run(remove_all_drafts, cache_dir)
        here = await _tokenizer_here(tokenizer, cache_dir, source, work)
        spec = spec.model_copy(update={"data": spec.data.model_copy(update={"tokenizer": here})})
        kept = await work.run(kept_corpus, cache_dir, digest)
        if data is not None and (kept is None or kept.whole is None):
            return _same(await _made(spec, cache_dir, data, work, tell), spec, data)
        if kept is None and spec.data.source == "stdlib" and tokenizer == BYTES:
            kept = await work.run(_made_here, spec, cache_dir, _until_cancelled(work, tell))
        if kept is None:
            kept = await described_corpus(digest, cache_dir, source, work)
        return await work.run(describe_corpus, spec, kept)


@contextmanager
def _told(cache_dir: Path) -> Iterator[None]:
    """Turn errors inside into sentences for people. Raises InvalidRunSpec, HomeError."""
    try:
        yield
    except (InvalidCorpus, ValueError) as error:
        raise InvalidRunSpec(f"data: {error}") from error
    except OSError as error:
        # An error of a write names no file; what is read is told by its name.
        path = Path(os.fsdecode(error.filename)) if error.filename else cache_dir
        if path.is_relative_to(cache_dir):
            raise HomeError(
                f"the corpus cannot be kept in {path}: {error.strerror}; make room or mend that"
                " folder, or give another home with --home"
            ) from error
        raise InvalidRunSpec(
            f"data: cannot read {path}: {error.strerror}; let this user read it, or leave it out"
            " of the source"
        ) from error


async def _tokenizer_here(digest: str, cache_dir: Path, source: BlobSource, work: Work) -> str:
    """Where the run's tokenizer is on this machine; it is fetched if it is not here.

    The founder's name of it means a file of the founder's, or whatever is on the hub.
    """
    if digest == BYTES:
        return BYTES
    path = tokenizer_path(cache_dir, digest)
    if not path.is_file():
        await work.run(replace_file, path, await source.blob(digest))
    return str(path)


def _keep_tokenizer(source: str, cache_dir: Path) -> None:
    if source != BYTES:
        data = tokenizer_file(source)
        replace_file(tokenizer_path(cache_dir, FileTokenizer(data).digest), data)


def _until_cancelled(work: Work, tell: Tell) -> Tell:
    """A `tell` for a thread, which also ends the work once its caller is cancelled."""

    def told(progress: TaskProgress) -> None:
        work.check_cancelled()
        tell(progress)

    return told


async def _made(
    spec: RunSpec, cache_dir: Path, data: str | None, work: Work, tell: Tell
) -> KeptCorpus:
    """`prepare_corpus`, in another process where a tokenizer runs."""
    if spec.data.tokenizer != BYTES:
        return await prepare_in_child(spec, cache_dir, data, tell)
    return await work.run(prepare_corpus, spec, cache_dir, data, _until_cancelled(work, tell))


def _same(made: KeptCorpus, spec: RunSpec, data: str) -> KeptCorpus:
    """The corpus from where the user says that it is. Raises InvalidCorpus: it is another."""
    if made.manifest_digest != spec.data.manifest:
        raise InvalidCorpus(
            f"--data {data} is another corpus ({made.manifest_digest}) than the run's"
            f" ({spec.data.manifest}): give the founder's, or leave --data out to fetch it"
        )
    return made


def _made_here(spec: RunSpec, cache_dir: Path, tell: Tell) -> KeptCorpus | None:
    """The standard library's corpus, if this Python's is the run's."""
    try:
        made = prepare_corpus(spec, cache_dir, None, tell)
    except (InvalidCorpus, ValueError, OSError):
        return None
    return made if made.manifest_digest == spec.data.manifest else None


# --- provision ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Supplies:
    """Data, engine and first state of a run on this machine.

    Attributes:
        blobs: digest to file, for joiners to fetch from us.
        num_blocks: training blocks of an epoch.
        piece_blocks: of them in one piece of the corpus; None where it is all one.
        store: the pieces that are here; None where the corpus has none.
        stores: those that joiners are given, by the corpus's name.
        domains: what is here of the corpora of all experts; None where the run has none.
        firsts: first weights of experts that begin from a checkpoint, which the founder has.
        remake: makes the first weights of the run again, as its founder made them.
        held_out: blocks of the domains of a run with experts, as far as they are here.
        vocabulary_size: of the tokenizer, where a text could be scored here.
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
    stores: Mapping[str, PieceStore] = field(default_factory=dict)
    domains: Domains | None = None
    held_out: HeldOut | None = None
    vocabulary_size: int = 0
    firsts: Mapping[int, Path] = field(default_factory=dict)
    remake: Callable[[], Awaitable[Beginning]] | None = None


@dataclass(frozen=True, slots=True)
class ChosenPart:
    """The stage of a pipeline, or the expert, that we are to hold.

    Attributes:
        number: of the stage, or of the expert.
        has_holders: whether others have begun with it. Of newcomers that choose it together each
            begins with the same first weights: if they waited for each other, none would begin.
    """

    number: int
    has_holders: bool
    is_trained: bool


ChoosePart = Callable[[], Awaitable[ChosenPart]]


class Provision(Protocol):
    """Gets a machine ready for a run. Raises InvalidRunSpec, HomeError, or as the source."""

    async def found(self, spec: RunSpec, expert: int | None) -> tuple[RunSpec, Supplies]:
        """`expert` is the one that we are to hold, where there are any."""

    async def obtain(
        self, spec: RunSpec, source: BlobSource, choose_part: ChoosePart
    ) -> Supplies: ...

    def misfits(self, spec: RunSpec) -> Mapping[int, str]:
        """Why this machine cannot train an expert, by its number; the others fit."""


def free_room(config: PeerConfig, root: Path) -> FreeRoom:
    """Disk and memory that are free on this machine, whose home is at `root`.

    Of several GPUs that train it is the fullest one: each holds as much as the others.
    """
    names = devices_of(config.gpus, config.device) or (config.device or "auto",)
    devices = [choose_device(name) for name in names]
    gpus = [torch.cuda.mem_get_info(each)[0] for each in devices if each.type == "cuda"]
    memory = psutil.virtual_memory().available
    return FreeRoom(free_bytes(root), memory, min(gpus, default=None), len(gpus) or 1)


@dataclass(eq=False)
class RealProvision:
    config: PeerConfig
    home: Home
    peer_id: PeerId
    work: Work
    spare: SpareChild
    tell: Tell

    def misfits(self, spec: RunSpec) -> Mapping[int, str]:
        free = free_room(self.config, self.home.root)
        each = ((n, misfit(self.config, model, free)) for n, model in enumerate(spec.models))
        return {number: why for number, why in each if why}

    async def found(self, spec: RunSpec, expert: int | None) -> tuple[RunSpec, Supplies]:
        if expert is None:
            whole = "stages" if spec.pipeline.stages > 1 else None
            spec, corpus = await self._frozen_data(spec, whole)
            spec, created, fresh = await self._frozen_model(spec, corpus)
            stage = DATA_STAGE if spec.pipeline.stages > 1 else None
            return spec, self._supplies(spec, corpus, _shape(created), fresh, stage)
        made = list[tuple[RunSpec, KeptCorpus]]()
        for each, model in zip(spec.experts, spec.models, strict=True):
            try:
                made.append(await self._frozen_data(model, "experts"))
            except InvalidRunSpec as error:
                raise InvalidRunSpec(f"expert {each.name}: {error}") from error
        frozen = [await self._frozen_expert(number, *each) for number, each in enumerate(made)]
        spec = validated(with_frozen_experts(spec, frozen).model_dump())
        return spec, await self._supplies_of_expert(spec, expert, NoSource(), lambda fresh: fresh)

    async def _frozen_data(
        self, spec: RunSpec, whole_texts: str | None
    ) -> tuple[RunSpec, KeptCorpus]:
        """`whole_texts` names those who learn no conversations, which a file of tokens may hold."""
        frozen, corpus = await freeze_data(
            spec, self.home.cache_dir, self.work, self.config.data, self.tell
        )
        if whole_texts is not None and corpus.has_conversations:
            raise InvalidRunSpec(
                f"data.source: {self.config.data or spec.data.source} holds conversations, and"
                f" {whole_texts} learn whole texts: use another source"
            )
        return frozen, corpus

    async def _frozen_expert(self, number: int, spec: RunSpec, corpus: KeptCorpus) -> RunSpec:
        """Freeze the model of one expert; first weights from a checkpoint are kept for others."""
        frozen, _, fresh = await self._frozen_model(spec, corpus)
        if spec.model.init_from is not None:
            assert frozen.frozen is not None
            slow_P = np.zeros(frozen.frozen.padded_parameters, np.float32)
            await fresh.initialise(slow_P)
            path = weights_file(self.home.state_dir, number)
            await self.work.run(partial(slow_P.astype("<f4").tofile, path))
            weights = await self.work.run(digest_of_weights, slow_P)
            section = frozen.frozen.model_copy(update={"weights": weights})
            return frozen.model_copy(update={"frozen": section})
        return frozen

    async def _frozen_model(
        self, spec: RunSpec, corpus: KeptCorpus
    ) -> tuple[RunSpec, ModelCreated, Fresh]:
        """Make the first weights of one model, and say in its spec what it looks like."""
        stage = DATA_STAGE if spec.pipeline.stages > 1 else None
        created, fresh = await self._first_weights(spec, corpus, stage)
        frozen = FrozenSection(
            config=created.config,
            layout_digest=created.whole.digest,
            parameters=created.whole.parameters,
            padded_parameters=created.whole.padded_parameters,
        )
        adapter = spec.adapter and spec.adapter.model_copy(update={"base": created.base})
        return spec.model_copy(update={"frozen": frozen, "adapter": adapter}), created, fresh

    async def _supplies_of_expert(
        self,
        run: RunSpec,
        number: int,
        source: BlobSource,
        beginning_with: Callable[[Beginning], Beginning],
    ) -> Supplies:
        """Supplies to train one expert, with what is here of all domains.

        The same first weights are made by all that come to an expert that nobody has begun.
        """
        spec = run.of_expert(number)
        corpus = await obtain_data(
            spec, self.home.cache_dir, source, self.work, self.config.data, self.tell
        )

        firsts = await self.work.run(kept_first_weights, run, self.home.state_dir)

        async def make(slow_P: Float32Vector) -> None:
            if number in firsts:
                slow_P[:] = await self.work.run(np.fromfile, firsts[number], "<f4")
                return
            _, fresh = await self._first_weights(spec, corpus, None)
            await fresh.initialise(slow_P)

        lacks = spec.model.init_from is not None and number not in firsts
        first: Beginning = FromFounder() if lacks else Fresh(make)
        shape = PartShape.of_whole_model(spec)
        own = self._supplies(spec, corpus, shape, beginning_with(first), None)
        domains = Domains(run, self.home.cache_dir, self.work, own.blobs, own.stores)
        await domains.find_kept()
        return replace(
            own,
            part=part_of_expert(number),
            blobs=domains.blobs,
            stores=domains.stores,
            domains=domains,
            firsts=firsts,
            held_out=held_out_in(run, domains),
            vocabulary_size=corpus.manifest.vocabulary_size,
        )

    async def obtain(self, spec: RunSpec, source: BlobSource, choose_part: ChoosePart) -> Supplies:
        """Take the corpus from here or from a peer; of a pipeline, the stage that needs us most."""
        if spec.experts:
            number = (await choose_part()).number
            return await self._supplies_of_expert(
                spec,
                number,
                source,
                partial(
                    FreshOrFetched,
                    seeded=spec.begins_with_seed(number),
                    then=self.spare.aclose,
                ),
            )
        corpus = await obtain_data(
            spec, self.home.cache_dir, source, self.work, self.config.data, self.tell
        )
        if spec.pipeline.stages == 1:
            shape = PartShape.of_whole_model(spec)
            supplies = self._supplies(spec, corpus, shape, FromPeers(), None)
            return replace(supplies, remake=partial(self._remade, spec, corpus))
        chosen = await choose_part()
        created, fresh = await self._first_weights(spec, corpus, chosen.number)
        beginning: Beginning = fresh
        if chosen.has_holders:
            beginning = FromPeers()
        elif chosen.is_trained:
            layouts = stage_layouts(created.whole, spec.pipeline.stages)
            beginning = Rebuilt(chosen.number, fresh, layouts)
        return self._supplies(spec, corpus, _shape(created), beginning, chosen.number)

    async def _remade(self, spec: RunSpec, corpus: KeptCorpus) -> Beginning:
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
        self, spec: RunSpec, corpus: KeptCorpus, stage: int | None
    ) -> tuple[ModelCreated, Fresh]:
        """The initialisation of the part that we hold, and a beginning with it."""
        weights = self.home.state_dir / "first-weights.f32"
        settings = self._trainer_settings(spec, corpus, stage)
        self.tell(TaskProgress("making the first weights"))
        try:
            created = await create_model(settings, weights, self.spare)
        except TrainerDied as died:
            weights.unlink(missing_ok=True)
            where = f"its first weights go into {self.home.state_dir}"
            raise InvalidRunSpec(f"the model cannot be made ({where}): {died}") from died

        async def initialise(slow_P: Float32Vector) -> None:
            slow_P[:] = await self.work.run(np.fromfile, weights, "<f4")
            weights.unlink()

        return created, Fresh(initialise)

    def _supplies(
        self,
        spec: RunSpec,
        corpus: KeptCorpus,
        shape: PartShape,
        beginning: Beginning,
        stage: int | None,
    ) -> Supplies:
        settings = self._trainer_settings(spec, corpus, stage)
        engine = partial(torch_engine, settings, self.spare)
        blobs = corpus.blobs
        tokenizer = tokenizer_path(self.home.cache_dir, corpus.manifest.tokenizer_digest)
        if tokenizer.is_file():
            blobs[corpus.manifest.tokenizer_digest] = tokenizer
        store = open_store(corpus)
        return Supplies(
            engine,
            blobs,
            corpus.manifest.num_blocks,
            shape=shape,
            beginning=beginning,
            part=WHOLE_MODEL if stage is None else part_of_stage(stage),
            piece_blocks=corpus.manifest.piece_blocks,
            store=store,
            stores={store.manifest.name: store},
        )

    def _trainer_settings(
        self, spec: RunSpec, corpus: KeptCorpus, stage: int | None
    ) -> TrainerSettings:
        config = self.config
        return TrainerSettings(
            spec=spec.with_overlap(config.overlap_steps).to_bytes(),
            peer_id=self.peer_id,
            corpus_path=str(corpus.folder),
            vocabulary_size=corpus.manifest.vocabulary_size,
            device=config.device or "auto",
            threads=config.threads or 0,
            stage=stage,
            checkpoint_activations=config.checkpoint_activations,
            shard_weights=config.shard_weights,
            devices=devices_of(config.gpus, config.device),
            split_context=config.split_context,
        )


def held_out_in(run: RunSpec, domains: Domains) -> HeldOut:
    """The blocks that are measured, of each domain whose held-out blocks have come by then."""
    found = dict[int, HeldOutBlocks]()

    def look() -> Sequence[HeldOutBlocks]:
        for number, corpus in domains.here.items():
            if number not in found:
                found[number] = _blocks_of(number, run.experts[number].name, corpus)
        return tuple(found.values())

    return look


def _blocks_of(number: int, name: str, corpus: KeptCorpus) -> HeldOutBlocks:
    made_of = corpus.manifest
    blocks = claimed_blocks(made_of.held_out_blocks, made_of.context_length)
    shape = blocks, made_of.context_length + 1
    tokens = np.fromfile(corpus.held_out, made_of.dtype, count=shape[0] * shape[1])
    return HeldOutBlocks(number, name, made_of.held_out, tokens.reshape(shape))


def _shape(created: ModelCreated) -> PartShape:
    return PartShape(created.layout.digest, created.layout.padded_parameters)
