"""The run spec: everything that all peers of a run must agree on, and nothing of one machine.

People write it as TOML; it travels as canonical bytes. The run id is a digest,
`run_id = blake3(founder_public_key + spec_bytes)`, so a joiner that holds it can take the spec from
anybody.

An unknown key is refused with the nearest valid name, and a value that cannot work with a sentence
that says what to change.
"""

import json
import tomllib
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import blake3
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from protocol.errors import InvalidRunSpec
from protocol.limits import MAX_PARAMETERS, MAX_SPEC_BYTES, MAX_STAGES
from protocol.names import LISTED, nearest, printable

from .families import MIXTURES, WITH_STAGES, config_fault, decoder_of, known_family
from .layout import ALIGNMENT, expert_of_part
from .sections import (
    LIST,
    MAX_STEPS,
    MISFIT,
    SIGNED,
    AdapterSection,
    AdmissionSection,
    DilocoSection,
    NolocoSection,
    NumberOrAuto,
    OptimizerSection,
    PipelineSection,
    Section,
    misfit,
    one_of,
    overlaid,
    section_in,
    with_section,
    without_streaming,
)
from .ways import CODECS, WAYS, codecs_for, others_keys

AUTO_ROUND_STEPS: Final = 64
"""Inner steps of a nominal round where each peer chooses its own."""
CONVERSATIONS: Final = "chat"
SOURCES: Final = ("stdlib", "text", "tokens", "jsonl", "parquet", "hf", CONVERSATIONS)
STDLIB_BYTES: Final = 8_000_000
"""Bound of the `stdlib` corpus, so that a joiner has it within seconds over a home uplink."""
OF_MIXTURES: Final = ("experts", "experts_per_token", "balance")
"""Keys of [model] that say nothing to a family without experts."""
KEYS_OF_WHOLE_MODELS: Final = ("gamma", "overlap")
"""Keys of [sync] that say nothing to pairs that average fragments."""
GONE: Final = {
    "pipeline.codec = int4": "6613df92",
    "pipeline.max_swap_distance": "d6cbf1c2",
    "pipeline.max_swap_sum": "d6cbf1c2",
    "pipeline.max_swaps": "d6cbf1c2",
    "sync.codec = e3m0": "6613df92",
    "sync.diloco.error_feedback": "6613df92",
    "sync.gasloc": "6613df92",
    "sync.method = gasloc": "6613df92",
    "sync.streaming": "c7cbd76b",
}
"""Keys and values of older runs, and the last commit that has them (docs/decisions)."""
KINDS: Final = {"model_type": "must be a section", "tuple_type": "must be a list"}
"""Words for errors of these types, where the library speaks of Python's types."""
MAX_SHOWN_CHARS: Final = 80
"""The most that is shown of a wrong value or key: it may be a stranger's."""


def _known_source(source: str) -> str:
    if source.partition(":")[0] not in SOURCES:
        what = f"unknown data source; use one of {', '.join(SOURCES)}"
        raise PydanticCustomError("source", "{what}", {"what": what})
    return source


Source = Annotated[str, AfterValidator(_known_source)]


class ModelSection(Section):
    """A decoder, from these sizes or from a checkpoint."""

    later: ClassVar = OF_MIXTURES

    family: Annotated[str, AfterValidator(known_family)] = "llama"
    """What transformers calls model_type (families.py)."""
    hidden_size: Annotated[int, Field(ge=8, le=65536)] = 128
    """Width; a multiple of 2 * num_heads."""
    intermediate_size: Annotated[int, Field(ge=8, le=1 << 20)] = 384
    """Width of the feed-forward layers."""
    num_layers: Annotated[int, Field(ge=1, le=1024)] = 4
    """Depth."""
    num_heads: Annotated[int, Field(ge=1, le=1024)] = 4
    """Attention heads."""
    num_kv_heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Key and value heads (grouped-query attention); num_heads when left out."""
    context_length: Annotated[int, Field(ge=8, le=1 << 20)] = 128
    """Tokens per sequence."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of the rotary position embedding."""
    tie_embeddings: bool = True
    """Share the input and output embeddings."""
    experts: Annotated[int, Field(ge=2, le=1024)] = 8
    """Experts of each layer in a mixture; the models of [[experts]] are others."""
    experts_per_token: Annotated[int, Field(ge=1, le=1024)] = 2
    """Experts of a layer that a token passes through."""
    balance: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Weight of the auxiliary loss that spreads tokens evenly over experts."""
    init_from: str | None = None
    """Begin from this checkpoint (folder or hub id): sizes, tokenizer, weights."""

    def idle(self) -> dict[str, str]:
        if self.family in MIXTURES or self.init_from is not None:
            return {}
        what = f"to '{self.family}': use family = '{MIXTURES[0]}', or leave it out"
        return dict.fromkeys(OF_MIXTURES, what)

    def _faults(self) -> Iterator[PydanticCustomError]:
        if self.init_from is not None:
            return  # family and sizes are the checkpoint's
        if self.hidden_size % (2 * self.num_heads):
            yield self._misfit(
                "hidden_size", f"must be a multiple of 2 * num_heads ({2 * self.num_heads})"
            )
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            yield self._misfit(
                "num_heads", f"must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.family in MIXTURES and self.experts_per_token > self.experts:
            yield self._misfit("experts_per_token", f"must be 1 to {self.experts}, the experts")


class DataSection(Section):
    """The corpus. `manifest` is filled in by `start`: it freezes the corpus by digest."""

    later: ClassVar = ("chat_template", "mask_documents", "document_end", "replay", "replay_share")

    source: Source = "stdlib"
    """'stdlib', 'text:GLOB', 'tokens:FILE', 'jsonl:GLOB', 'parquet:GLOB', 'hf:NAME' or
    'chat:GLOB'."""
    tokenizer: str = "bytes"
    """'bytes', or a Hugging Face tokenizer; leave it out with init_from."""
    chat_template: Annotated[str, Field(max_length=65536)] | None = None
    """How `chat:` conversations are written, in Jinja; the tokenizer's when left out."""
    replay: Source | None = None
    """Older texts to train on beside those of the source, named as that is."""
    replay_share: Annotated[float, Field(gt=0, le=0.99)] = 0.25
    """Their part of all tokens."""
    mask_documents: bool = False
    """Attention sees a token's own document alone, not those before it in the block."""
    validation_blocks: Annotated[int, Field(ge=1, le=65536)] = 64
    """Sequences held out for validation, the same everywhere."""
    piece_kib: Annotated[int, Field(ge=16, le=16384)] = 4096
    """Size of the pieces in which peers fetch the corpus, in KiB."""
    manifest: str | None = None
    """Digest of the corpus manifest; set by the founder's `start`."""
    tokenizer_digest: str | None = None
    """Digest of the tokenizer's file; set by the founder's `start`."""
    document_end: Annotated[int, Field(ge=0, lt=MAX_PARAMETERS)] | None = None
    """The token behind each document; set by the founder's `start` with mask_documents."""

    def idle(self) -> dict[str, str]:
        replay = {"replay_share": "without data.replay; leave it out"}
        mask = {"document_end": "without mask_documents: leave it out"}
        return {**(replay if self.replay is None else {}), **({} if self.mask_documents else mask)}

    def _faults(self) -> Iterator[PydanticCustomError]:
        kinds = [source.partition(":")[0] for source in self.sources]
        if self.mask_documents and CONVERSATIONS in kinds:
            what = "no token of its own ends a conversation, so none can be told from the next"
            yield self._misfit("mask_documents", f"{what}: leave it out")

    @property
    def sources(self) -> tuple[str, ...]:
        """All that the corpus is made of."""
        return (self.source,) if self.replay is None else (self.source, self.replay)


def _yes_no_or_auto(value: object) -> object:
    if value == "auto" or isinstance(value, bool):
        return value
    raise PydanticCustomError("yes_no_or_auto", "must be true, false or 'auto'")


class TrainingSection(Section):
    total_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 1200
    """Inner steps of the whole run, rounded up to whole rounds."""
    batch_size: Annotated[int, Field(ge=1, le=1 << 20)] = 8
    """Sequences per inner step and peer."""
    micro_batch: NumberOrAuto = "auto"
    """Sequences per forward pass; 'auto' finds what fits the memory."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """'fp32', 'bf16', or 'auto': bf16 on GPUs that compute in it, else fp32."""
    compile: Annotated[bool | Literal["auto"], BeforeValidator(_yes_no_or_auto)] = False
    """torch.compile: slow to start, then fast; 'auto': on GPUs, where it works."""


class SyncSection(Section):
    """How peers average. By default pairs take their mean (decision 0039)."""

    method: Annotated[str, one_of(WAYS)] = "noloco"
    """'noloco': pairs average; 'diloco': all do, in fragments."""
    inner_steps: NumberOrAuto = 50
    """H: inner steps of a round; 'auto' fills each line. More: less traffic, looser replicas."""
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Outer momentum."""
    beta: Annotated[float, Field(gt=0)] = 1.0
    """Outer learning rate."""
    gamma: Annotated[float, Field(ge=0)] | None = None
    """Pull between slow weights; beta when left out, which halves the bytes."""
    codec: Annotated[str, one_of(CODECS)] = "int8"
    """One of the codecs (ways.py)."""
    overlap: bool = True
    """Keep training while weights travel; false is the paper's blocking form."""
    final_averaging: bool = True
    """End the run with the mean of all replicas."""
    validate_every: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 1
    """Rounds between two validations; more where they take over 2% of its time (16 first: 10%)."""
    diloco: DilocoSection | None = None
    """With `method = "diloco"` only, and then never None."""
    noloco: NolocoSection | None = None
    """With `method = "noloco"` only, and then never None."""

    gone: ClassVar = {"gasloc": None, "streaming": None}

    @classmethod
    def _completed(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Add the section of the method."""
        tree = without_streaming(tree)
        method = tree.get("method", cls.model_fields["method"].default)
        if isinstance(method, str) and (row := WAYS.get(method)):
            return with_section(tree, row.section)
        return tree

    def idle(self) -> dict[str, str]:
        what = f"to {self.method}; its keys are in [sync.{WAYS[self.method].section}]"
        keys = dict.fromkeys(sorted(others_keys(self.method)), what)
        if self.noloco is not None and not self.noloco.is_whole:
            what = "to fragments in pairs; leave it out"
            keys |= dict.fromkeys(KEYS_OF_WHOLE_MODELS, what)
        return keys

    def _faults(self) -> Iterator[PydanticCustomError]:
        way = WAYS[self.method]
        for name, row in WAYS.items():
            if row.section != way.section and getattr(self, row.section):
                yield self._misfit("method", f'[sync.{row.section}] needs method = "{name}"')
        if self.codec not in (fitting := codecs_for(self.method)):
            coarse = CODECS[self.codec].differences_only
            why = "too coarse for whole weights" if coarse else "only for ways in pairs"
            yield self._misfit("codec", f"{why}: use one of {', '.join(fitting)}")
        yield from self._round_faults()
        bound = (2 + self.alpha**2) ** 0.5
        if "alpha" in way.keys and self.effective_gamma >= bound:
            key = "beta" if self.gamma is None else "gamma"
            yield self._misfit(key, f"diverges: must be below sqrt(2 + alpha^2) = {bound:.3f}")

    def _round_faults(self) -> Iterator[PydanticCustomError]:
        if self.inner_steps == "auto":
            if self.noloco is not None and not self.noloco.is_whole:
                what = "give a number, or average whole models"
                yield self._misfit(
                    "inner_steps", f"pairs have a schedule of fragments by H: {what}"
                )
            if not WAYS[self.method].has_own_rounds:
                names = " or ".join(f'"{name}"' for name, row in WAYS.items() if row.has_own_rounds)
                what = f"has a schedule of fragments by H: give a number, or use {names}"
                yield self._misfit("inner_steps", f"{self.method} {what}")
            if not self.overlap:
                what = "without overlap no rounds fill the line: give a number"
                yield self._misfit("inner_steps", what)
        if self.diloco is not None and self.diloco.overlap_steps >= self.round_steps:
            yield self._misfit(
                "inner_steps",
                f"must be above diloco.overlap_steps ({self.diloco.overlap_steps}): a fragment"
                " comes back before it is sent again; raise it, or lower overlap_steps",
            )

    @property
    def pairs(self) -> NolocoSection:
        """[sync.noloco] of a run that averages in pairs."""
        assert self.noloco is not None
        return self.noloco

    @property
    def round_steps(self) -> int:
        """Inner steps of a nominal round, which all peers count in: H, where that is a number."""
        return AUTO_ROUND_STEPS if self.inner_steps == "auto" else self.inner_steps

    @property
    def effective_gamma(self) -> float:
        return self.beta if self.gamma is None else self.gamma


class FrozenSection(Section):
    """Found out by the founder's `start`, so that no joiner has to."""

    later: ClassVar = ("weights",)

    config: Annotated[str, Field(max_length=65536)]
    """The model's configuration as Hugging Face's config.json, of the keys in families.py."""
    layout_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32,64}$")]
    parameters: Annotated[int, Field(ge=1, le=MAX_PARAMETERS)]
    padded_parameters: Annotated[int, Field(ge=128, multiple_of=128, le=2 * MAX_PARAMETERS)]
    # Digest of an expert's first weights, where these are a checkpoint's.
    weights: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None

    def _faults(self) -> Iterator[PydanticCustomError]:
        if (fault := config_fault(self.config)) is not None:
            yield self._misfit("config", fault)


SEED: Final = "seed"
FRESH: Final = "fresh"
NONE: Final = "none"
SIZES: Final = (
    "family",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "tie_embeddings",
    "experts",
)
"""Keys of [model] that must be equal where one expert begins with another's weights."""
ONE_TOKENIZER: Final = (
    "all experts have one tokenizer, since the ensemble compares what they say of the same tokens:"
    " set data.tokenizer"
)


class ExpertSection(Section):
    """One of several models of a run (decision 0056).

    Sections are whole here and in signed bytes; people write what differs.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$")]
    """For people: letters, digits, '.', '_' and '-'."""
    source: Source | None = None
    """Its domain, as data.source; the generalist's is data.source itself."""
    begin: Annotated[str, Field(min_length=1)] = FRESH
    """'seed' (the generalist's weights, where sizes are equal), 'fresh', or a checkpoint."""
    model: ModelSection = ModelSection()
    """What differs of [model]: the sizes."""
    training: TrainingSection = TrainingSection()
    """What differs of [training]: its steps, its batch."""
    manifest: str | None = None
    """Digest of its corpus's manifest; set by the founder's `start`."""
    frozen: FrozenSection | None = None
    """Set by the founder's `start`."""

    @classmethod
    def _completed(cls, tree: dict[str, Any]) -> dict[str, Any]:
        if "tokenizer" in tree:
            raise misfit("tokenizer", ONE_TOKENIZER, tree["tokenizer"])
        return tree

    def _faults(self) -> Iterator[PydanticCustomError]:
        if self.name in (NONE, SEED, FRESH):
            yield self._misfit("name", "is a word of the run spec; choose another")
        if self.model.init_from is not None:
            what = "an expert's `begin` names its checkpoint"
            yield misfit("model.init_from", what, self.model.init_from)

    def differing_sizes(self, other: ModelSection) -> list[str]:
        return [key for key in SIZES if getattr(self.model, key) != getattr(other, key)]


class EnsembleSection(Section):
    """How the experts branch, and how they answer together (protocol/experts/ensemble.py)."""

    branch_round: Annotated[int, Field(ge=0, le=MAX_STEPS)] | None = None
    """The round until which all train the generalist; half of its rounds when left out."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight of earlier tokens in the posterior; 1 forgets nothing."""
    fixed_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Part of the posterior that all experts share alike; 1 is the plain mean."""
    top: Annotated[int, Field(ge=1, le=MAX_STAGES)] = 2
    """Experts that weigh in on a token."""
    anchor: str | None = None
    """The generalist's name, where it answers with the others; or 'none'."""
    shared: Literal["none"] = NONE
    """Parameters that all experts train together: 'none' is all there is."""


def with_experts(tree: dict[str, Any]) -> dict[str, Any]:
    """Add what experts leave out of a run spec's tree: the run's values, and where they begin."""
    experts = tree.get("experts")
    if not experts or not isinstance(experts, list | tuple) or len(experts) > MAX_STAGES:
        return tree
    beside = {key: _known(key, _plain(tree.get(key))) for key in ("model", "training")}
    beside["model"].pop("init_from", None)
    whole = [overlaid(beside, each) if isinstance(each, dict) else each for each in experts]
    first, *others = whole
    for each in others:
        if isinstance(each, dict):
            each.setdefault("begin", SEED if _sizes(each) == _sizes(first) else FRESH)
    tree = with_section({**tree, "experts": whole}, "ensemble")
    ensemble = tree["ensemble"]
    if isinstance(ensemble, dict) and isinstance(first, dict) and ensemble.get("anchor") is None:
        tree["ensemble"] = {**ensemble, "anchor": first.get("name")}
    return tree


def _sizes(expert: Any) -> list[Any]:
    model = _plain(_plain(expert).get("model"))
    return [model.get(key, ModelSection.model_fields[key].default) for key in SIZES]


def _known(section: str, tree: dict[str, Any]) -> dict[str, Any]:
    """Without keys that no section has: they are told of once, where the run has them."""
    known = _field_names((section,))
    return {key: value for key, value in tree.items() if key in known}


def _plain(section: Any) -> dict[str, Any]:
    if isinstance(section, BaseModel):
        return section.model_dump()
    return dict(section) if isinstance(section, dict) else {}


class RunSpec(Section):
    later: ClassVar = ("adapter", "experts", "ensemble")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "run"
    """For people: letters, digits, '.', '_' and '-'."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Initial weights, the order of the data and the pairing of peers follow from it."""
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    training: TrainingSection = TrainingSection()
    sync: SyncSection = SyncSection()
    pipeline: PipelineSection = PipelineSection()
    adapter: AdapterSection | None = None
    """Trains adapters of model.init_from, and not its own weights."""
    admission: AdmissionSection = AdmissionSection()
    experts: Annotated[tuple[ExpertSection, ...], Field(max_length=MAX_STAGES), LIST] = ()
    """Several models instead of one; the first is the generalist."""
    ensemble: EnsembleSection | None = None
    """With experts only, and then never None."""
    frozen: FrozenSection | None = None
    """Set by the founder's `start`."""

    @classmethod
    def _completed(cls, tree: dict[str, Any]) -> dict[str, Any]:
        return with_experts(tree)

    def _faults(self) -> Iterator[PydanticCustomError]:
        stages, layers = self.pipeline.stages, self.model.num_layers
        if stages > layers and self.model.init_from is None:
            what = f"a stage needs a layer; at most model.num_layers ({layers})"
            yield misfit("pipeline.stages", what, stages)
        if stages > 1 and self.model.family not in WITH_STAGES:
            what = f"'{self.model.family}' is not cut into stages; {', '.join(WITH_STAGES)} are"
            yield misfit("pipeline.stages", what, stages)
        if stages > 1 and self.model.context_length * self.model.hidden_size % ALIGNMENT:
            what = (
                "a boundary has model.context_length * model.hidden_size values,"
                f" which must be a multiple of {ALIGNMENT}"
            )
            yield misfit("pipeline.stages", what, stages)
        if stages > 1 and self.has_conversations:
            what = "stages learn whole texts: use another source, or leave stages out"
            yield misfit("data.source", what, self.data.source)
        if stages > 1 and self.data.mask_documents:
            what = "stages see no tokens, so not where documents end: leave one of the two out"
            yield misfit("data.mask_documents", what, self.data.mask_documents)
        if self.adapter is not None:
            yield from self._adapter_faults()
        if stages > 1 and self.sync.inner_steps == "auto":
            what = "stages choose no rounds of their own: give a number where there are stages"
            yield misfit("sync.inner_steps", what, "auto")
        if self.experts:
            yield from self._expert_faults()
        elif self.ensemble is not None:
            yield misfit("ensemble", "needs [[experts]]", self.ensemble.model_dump())

    def _adapter_faults(self) -> Iterator[PydanticCustomError]:
        if self.pipeline.stages > 1:
            what = "adapters are of whole models: leave [adapter] or the stages out"
            yield misfit("pipeline.stages", what, self.pipeline.stages)
        if self.experts:
            what = "experts train whole models: leave [adapter] or [[experts]] out"
            yield misfit("adapter", what, self.adapter)
        elif self.model.init_from is None:
            what = "must name the checkpoint that [adapter] is for: a folder, or a name on the hub"
            yield misfit("model.init_from", what, None)

    def _expert_faults(self) -> Iterator[PydanticCustomError]:
        if self.pipeline.stages > 1:
            what = "experts are whole models so far: leave stages out, or [[experts]]"
            yield misfit("pipeline.stages", what, self.pipeline.stages)
        if self.has_conversations:
            what = "experts are compared by whole texts: use another source than 'chat'"
            yield misfit("data.source", what, self.data.source)
        if self.data.replay is not None:
            what = "experts have a text each: leave it out, and name both in one source"
            yield misfit("data.replay", what, self.data.replay)
        if self.model.init_from is not None:
            what = "with [[experts]] the first one's `begin` names the checkpoint"
            yield misfit("model.init_from", what, self.model.init_from)
        names = [expert.name for expert in self.experts]
        for name in names:
            if names.count(name) > 1:
                yield misfit("experts", "two have one name; give each its own", name)
        yield from self._generalist_faults()
        for expert in self.experts[1:]:
            yield from self._specialist_faults(expert)

    def _generalist_faults(self) -> Iterator[PydanticCustomError]:
        first, ensemble = self.experts[0], self.ensemble
        assert ensemble is not None
        if len(self.experts) == 1:
            yield misfit("experts", "one model needs no experts: leave them out", first.name)
        if first.begin == SEED:
            what = "the first expert is the seed of the others: 'fresh', or a checkpoint"
            yield misfit(f"experts.{first.name}.begin", what, SEED)
        if first.source is not None:
            what = "the first expert is the generalist, whose text is data.source: leave it out"
            yield misfit(f"experts.{first.name}.source", what, first.source)
        if ensemble.anchor not in (first.name, NONE):
            what = f"must be '{first.name}', the first expert, or '{NONE}'"
            yield misfit("ensemble.anchor", what, ensemble.anchor)
        if self.branch_round > (most := self.of_expert(0).total_rounds):
            what = f"the generalist has {most} rounds; branch in one of them"
            yield misfit("ensemble.branch_round", what, self.branch_round)

    def _specialist_faults(self, expert: ExpertSection) -> Iterator[PydanticCustomError]:
        first, where = self.experts[0], f"experts.{expert.name}"
        if expert.source is None:
            what = "an expert needs a domain of its own, such as 'text:code/*.txt'"
            yield misfit(f"{where}.source", what, None)
        if expert.model.context_length != first.model.context_length:
            what = f"must be {first.model.context_length}: all experts are asked about equal blocks"
            yield misfit(f"{where}.model.context_length", what, expert.model.context_length)
        if expert.begin == SEED and (sizes := expert.differing_sizes(first.model)):
            what = (
                f"'{first.name}' has other sizes ({', '.join(sizes)}), so its weights do not fit:"
                f" use '{FRESH}', or equal sizes"
            )
            yield misfit(f"{where}.begin", what, SEED)
        tokens = [
            decoder_of(each.frozen.config).vocab_size
            for each in (first, expert)
            if each.frozen is not None
        ]
        if len(set(tokens)) > 1:
            yield misfit(f"{where}.frozen.config", ONE_TOKENIZER, f"{tokens[1]} tokens")

    @property
    def branch_round(self) -> int:
        """The round of the generalist at which its peers go over to the other experts."""
        if self.ensemble is None or self.ensemble.branch_round is None:
            return self.of_expert(0).total_rounds // 2
        return self.ensemble.branch_round

    @property
    def branch_step(self) -> int:
        return self.branch_round * self.sync.round_steps

    def begins_with_seed(self, number: int) -> bool:
        """Whether an expert begins with the weights that the generalist has at the branch."""
        seed, own = (self.experts[n].frozen for n in (0, number))
        branches = bool(number and self.branch_round and self.experts[number].begin == SEED)
        equal = seed is None or own is None or seed.layout_digest == own.layout_digest
        return branches and equal

    def of_expert(self, number: int) -> Self:
        """The run that an expert is by itself: what is asked of a run can be asked of it."""
        expert, data = self.experts[number], self.data
        if expert.source is not None:
            data = data.model_copy(update={"source": expert.source, "manifest": expert.manifest})
        begins_at = None if expert.begin in (SEED, FRESH) else expert.begin
        own = {
            "model": expert.model.model_copy(update={"init_from": begins_at}),
            "training": expert.training,
            "data": data,
            "frozen": expert.frozen,
        }
        return self.model_copy(update={**own, "experts": (), "ensemble": None})

    @property
    def models(self) -> tuple[Self, ...]:
        """The runs that the experts are by themselves; the run itself, where there are none."""
        return tuple(map(self.of_expert, range(len(self.experts)))) or (self,)

    def expert_named(self, name: str | None) -> int | None:
        """The number of an expert; None where the run has none.

        Raises InvalidRunSpec: none is named, or there is none of that name.
        """
        names = [expert.name for expert in self.experts]
        if name in names:
            return names.index(name)
        listed = ", ".join(names)
        if name is None and not names:
            return None
        if name is None:
            raise InvalidRunSpec(f"the run has experts ({listed}): say which with --expert NAME")
        if not names:
            raise InvalidRunSpec(f"--expert {name}: the run has no experts; leave it out")
        raise InvalidRunSpec(f"the run has no expert '{name}', but {listed}{nearest(name, names)}")

    def name_of(self, part: str) -> str | None:
        """The name of the expert that a part is; None where this run has none of that number."""
        number = expert_of_part(part)
        known = number is not None and number < len(self.experts)
        return self.experts[number].name if known and number is not None else None

    @property
    def has_conversations(self) -> bool:
        sources = (source for model in self.models for source in model.data.sources)
        return any(source.startswith("chat:") for source in sources)

    @property
    def total_rounds(self) -> int:
        return -(-self.training.total_steps // self.sync.round_steps)

    @property
    def tokens_per_step(self) -> int:
        return self.training.batch_size * self.model.context_length

    @property
    def microbatch_sequences(self) -> int:
        """Sequences of a microbatch in a pipeline: `micro_batch`; one, where it is 'auto'."""
        size = self.training.micro_batch
        return size if isinstance(size, int) else 1

    def with_overlap(self, steps: int | None) -> Self:
        """The spec for a peer with its own tau; None is the run's."""
        if steps is None or self.sync.diloco is None:
            return self
        diloco = self.sync.diloco.model_copy(update={"overlap_steps": steps})
        sync = self.sync.model_copy(update={"diloco": diloco})
        return self.model_copy(update={"sync": sync})

    def to_bytes(self) -> bytes:
        """The canonical bytes: JSON, keys sorted, no spaces, every field but what came `later`.

        Run ids are digests of these bytes, so what is gone stays in them, and fragments in pairs as
        the method `streaming`.
        """
        tree = self.model_dump(mode="json", context=SIGNED)
        sync = tree["sync"]
        noloco = sync.pop("noloco")
        if self.sync.noloco is not None and not self.sync.noloco.is_whole:
            sync["method"], sync["streaming"] = "streaming", noloco
        return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def kind_of(source: str) -> tuple[str, str]:
    """`text:GLOB` to its parts; what names no kind is a file of tokens."""
    kind, colon, where = source.partition(":")
    if kind == SOURCES[0] or (colon and kind in SOURCES):
        return kind, where
    return "tokens", source


def run_id_of(spec_bytes: bytes, founder_public_key: bytes) -> str:
    return blake3.blake3(founder_public_key + spec_bytes).hexdigest(length=16)


def parse_toml(text: str, *, beside: RunSpec | None = None) -> RunSpec:
    """Read a run spec as people write it; `beside` stands for the defaults.

    Raises InvalidRunSpec.
    """
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        two_forms = "; write a section's keys as section.key, or below [section], not both"
        hint = two_forms if "Cannot declare" in str(error) else ""
        raise InvalidRunSpec(f"not TOML: {error}{hint}") from error
    return validated(tree if beside is None else _beside(beside, tree))


def _beside(run: RunSpec, tree: dict[str, Any]) -> dict[str, Any]:
    """The run with a tree's values over its own; experts go by name. Raises InvalidRunSpec."""
    whole, written = run.model_dump(), tree.get("experts")
    if not isinstance(written, list):
        return overlaid(whole, tree)
    experts = list(whole["experts"])
    for each in map(_plain, written):
        number = run.expert_named(str(each.get("name")))
        assert number is not None
        experts[number] = overlaid(experts[number], each)
    return {**overlaid(whole, tree), "experts": experts}


def parse_bytes(data: bytes) -> RunSpec:
    """Read canonical bytes. Raises InvalidRunSpec."""
    if len(data) > MAX_SPEC_BYTES:
        raise InvalidRunSpec(f"run spec of {len(data)} bytes; at most {MAX_SPEC_BYTES} are allowed")
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:  # the latter: a million brackets
        raise InvalidRunSpec(f"not JSON: {error}") from error
    spec = validated(tree)
    if spec.to_bytes() != data:
        raise InvalidRunSpec("the run spec's bytes are not in canonical form")
    return spec


def validated(tree: Any) -> RunSpec:
    """Read the tree of a TOML or JSON file. Raises InvalidRunSpec."""
    try:
        return RunSpec.model_validate(tree)
    except ValidationError as error:
        faults = error.errors()
        told = [_sentence(fault, tree) for fault in faults[:LISTED]]
        if len(faults) > len(told):
            told.append(f"and {len(faults) - len(told)} more")
        raise InvalidRunSpec("; ".join(told)) from error


def _sentence(error: Any, tree: Any) -> str:
    path = [_shown_part(error["loc"][:at], part, tree) for at, part in enumerate(error["loc"])]
    where = ".".join(path)
    if error["type"] == "extra_forbidden":
        hint = nearest(path[-1], _field_names(error["loc"][:-1]))
        return f"unknown key '{where}'{_where_it_was(where) or hint}"
    if error["type"] == MISFIT:
        path, value = [*path, error["ctx"]["key"]], error["ctx"]["value"]
    else:
        value = error["input"]
    got = "" if isinstance(value, dict) else f" (got {_shown(value)})"  # a section is no value
    where = ".".join(path)
    return (
        f"{where or 'run spec'}: {what_is_wrong(error)}{got}{_where_it_was(f'{where} = {value}')}"
    )


def _where_it_was(named: str) -> str:
    last = GONE.get(named)
    why = f"; it is gone: commit {last} had it last; go on with the run in that, or found a new one"
    return "" if last is None else why


def what_is_wrong(error: Any) -> str:
    said: str = KINDS.get(error["type"], error["msg"])
    return said.replace("Input should be", "must be")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _shown_part(above: tuple[str | int, ...], part: str | int, tree: Any) -> str:
    """A part of a key's path; experts go by their names."""
    if above == ("experts",) and isinstance(part, int):
        name = _plain(tree["experts"][part]).get("name")
        part = name if isinstance(name, str) else part
    return printable(str(part))[:MAX_SHOWN_CHARS]


def _field_names(path: tuple[str | int, ...]) -> list[str]:
    section: type[Section] | None = RunSpec
    for part in path:
        if isinstance(part, str):  # a number counts the experts
            section = section and section_in(section.model_fields[part].annotation)
    return list(section.model_fields) if section else []
