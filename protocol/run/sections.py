"""Sections of the run spec.

protocol/pipeline/problem.py explains the words of [pipeline] and the rules of paths (CC1 to CC3).
Jumps may be as far as in SkipPipe's last release (4, July 2025); its later fork (November 2025)
allows 3, and lets every tenth iteration skip nothing (`full_every`). The releases' swaps of stages,
which the fork does not have, went: they cost learning and saved no time
(docs/results/pipeline_learning.md).
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializationInfo,
    model_serializer,
    model_validator,
)
from pydantic import SerializerFunctionWrapHandler as Dumped
from pydantic_core import PydanticCustomError

from protocol.address.peer_id import public_key_from_peer_id
from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_STAGES

# --- any section ----------------------------------------------------------------------------------
MAX_LISTED: Final = 1024
"""Peers that a list of admission names."""
MAX_STEPS: Final = 1 << 40
"""Bound of all numbers of steps: every float and integer on the wire and on the disk holds it."""
LIST: Final = Field(strict=False)
"""Marks a tuple that is written as a list; what is in it stays strict."""
MISFIT: Final = "misfit"
"""Type of the error of a value that is wrong beside others."""


SIGNED: Final = "signed"
"""The context in which a section is written into the bytes that are signed."""


class Section(BaseModel):
    """Kinds are strict: neither `true` nor `"8"` is a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    # Keys that are gone, with their values in the signed bytes of runs that never used them.
    gone: ClassVar[Mapping[str, Any]] = {}
    # Keys that signed bytes leave out at their default: runs that were founded before there was a
    # choice keep their ids (decisions 0033 and 0056).
    later: ClassVar[Collection[str]] = ()

    @model_validator(mode="before")
    @classmethod
    def _tree_read(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        whole = cls._completed(tree)
        return {key: value for key, value in whole.items() if not cls._is_gone(key, value)}

    @classmethod
    def _is_gone(cls, key: str, value: Any) -> bool:
        """Whether it says nothing any more; False is not 0."""
        if key not in cls.gone:
            return False
        said = cls.gone[key]
        return type(value) is type(said) and bool(value == said)

    @classmethod
    def _completed(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """With what is left out where it follows from the rest."""
        return tree

    @model_serializer(mode="wrap")
    def _written(self, dumped: Dumped, info: SerializationInfo) -> dict[str, Any]:
        tree: dict[str, Any] = dumped(self)
        if info.context is not SIGNED:
            return tree
        same = {key for key in self.later if self._has_default(key)}
        kept = {key: value for key, value in tree.items() if key not in same}
        return {**kept, **self.gone}

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        for key, what in self.idle().items():
            if not self._has_default(key):
                raise self._misfit(key, f"says nothing {what}")
        for fault in self._faults():
            raise fault
        return self

    def idle(self) -> dict[str, str]:
        """Keys that say nothing beside the others, and what to do about them."""
        return {}

    def _faults(self) -> Iterator[PydanticCustomError]:
        yield from ()

    def _has_default(self, key: str) -> bool:
        return bool(getattr(self, key) == type(self).model_fields[key].default)

    def _misfit(self, key: str, what: str) -> PydanticCustomError:
        return misfit(key, what, getattr(self, key))


def misfit(key: str, what: str, value: Any) -> PydanticCustomError:
    """A value that is wrong beside others; `key` is dotted, from the section that finds it."""
    return PydanticCustomError(MISFIT, "{what}", {"what": what, "key": key, "value": value})


def one_of(known: Collection[str]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in known:
            names = {"names": ", ".join(known)}
            raise PydanticCustomError("unknown", "unknown: use one of {names}", names)
        return name

    return AfterValidator(check)


def section_in(annotation: Any) -> type[Section] | None:
    kinds = (annotation, *get_args(annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)


def with_section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    return {**tree, name: {}} if tree.get(name) is None else tree


def overlaid(tree: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """The values of `upper`, and those of `tree` where it has none."""
    both = {
        key: overlaid(tree[key], value)
        for key, value in upper.items()
        if isinstance(value, dict) and isinstance(tree.get(key), dict)
    }
    return {**tree, **upper, **both}


def _number_or_auto(value: object) -> object:
    if value == "auto" or (type(value) is int and 1 <= value <= MAX_STEPS):
        return value
    raise PydanticCustomError(
        "number_or_auto", "must be a whole number from 1 to {most}, or 'auto'", {"most": MAX_STEPS}
    )


NumberOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto)]


# --- admission ------------------------------------------------------------------------------------
def _peer_id(text: str) -> str:
    try:
        public_key_from_peer_id(text)
    except RemoteProtocolError as error:
        raise ValueError(f"not a peer id ({error}); `loco-peer status` shows that of a home") from (
            error
        )
    return text


class AdmissionSection(Section):
    mode: Literal["open", "invite", "list"] = "open"
    """'open' to everybody, 'invite' (see `loco-peer invite`) or 'list'."""
    peers: Annotated[
        tuple[Annotated[str, AfterValidator(_peer_id)], ...], Field(max_length=MAX_LISTED), LIST
    ] = ()
    """Peer ids that may join in any case; for 'invite' and 'list'."""
    secret_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Digest of the run's secret; set by the founder's `start` where not everybody may join."""

    def _faults(self) -> Iterator[PydanticCustomError]:
        if self.mode == "open" and self.peers:
            what = "an open run takes everybody; set mode to 'list' or leave it out"
            yield self._misfit("peers", what)


# --- optimizer ------------------------------------------------------------------------------------
MOST_BF16_BETA: Final = 0.99
"""Rounded to bf16, a moment may lose a step that moves it by less than 1/256."""
_Beta = Annotated[float, Field(ge=0, lt=1)]


class MuonSection(Section):
    """Muon, for the matrices of the blocks; AdamW trains embeddings, head and norms."""

    learning_rate: Annotated[float, Field(gt=0, lt=10)] | None = None
    """Its peak; default: AdamW's. Short runs need 4 times that."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's."""
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Size of a step: 'match_rms_adamw' fits AdamW's rates; 'original'."""


class OptimizerSection(Section):
    """The inner optimizer and its schedule, all in nominal steps."""

    later: ClassVar = ("name", "muon", "moments")

    name: Literal["adamw", "muon"] = "adamw"
    """'adamw', or 'muon' for the blocks' matrices with AdamW for the rest."""
    learning_rate: Annotated[float, Field(gt=0, lt=10)] = 3e-3
    """Peak of the schedule."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Where the schedule ends, as a part of the peak."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """'cosine', 'wsd' (warm-up, stable, decay) or 'constant'."""
    warmup_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 60
    """Steps over which the rate rises; joiners warm up by themselves."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """'wsd' only: the last part of the run, over which the rate falls."""
    betas: Annotated[tuple[_Beta, _Beta], LIST] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """On matrices."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients longer than this are scaled down to it."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """How past gradients are kept: 'bf16' takes half of the memory."""
    muon: MuonSection | None = None
    """With `name = "muon"` only, and then never None."""

    @classmethod
    def _completed(cls, tree: dict[str, Any]) -> dict[str, Any]:
        return with_section(tree, "muon") if tree.get("name") == "muon" else tree

    def _faults(self) -> Iterator[PydanticCustomError]:
        if self.muon is not None and self.name != "muon":
            yield self._misfit("name", '[optimizer.muon] needs name = "muon"')
        momentum = 0.0 if self.muon is None else self.muon.momentum
        if self.moments == "bf16" and max(*self.betas, momentum) > MOST_BF16_BETA:
            what = (
                f"needs betas and momentum up to {MOST_BF16_BETA}: slower moments would stand still"
            )
            yield self._misfit("moments", what)


# --- pipeline -------------------------------------------------------------------------------------
BoundaryCodec = Literal["fp32", "bf16", "int8"]
"""Each takes half the bytes of the one before."""
BOUNDARY_BITS: Final = {"fp32": 32, "bf16": 16, "int8": 8}
"""Bits of a value, scales left out."""


class PipelineSection(Section):
    gone: ClassVar = {"max_swaps": 0, "max_swap_distance": 1, "max_swap_sum": 2}

    stages: Annotated[int, Field(ge=1, le=MAX_STAGES)] = 1
    """Parts of the model, on separate machines; 1 is no pipeline."""
    visited: Annotated[int, Field(ge=2, le=MAX_STAGES)] | None = None
    """Stages that a microbatch passes through; three quarters when left out."""
    max_jump: Annotated[int, Field(ge=1, le=MAX_STAGES)] = 4
    """How far a path may go from one stage to the next."""
    full_every: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """One iteration in this many skips no stage; 0: none."""
    codec: BoundaryCodec = "bf16"
    """What travels between stages: 'fp32', 'bf16' or 'int8'."""
    routing: Literal["planned", "random"] = "planned"
    """'planned': paths follow from measured links; 'random': they are drawn."""

    def _faults(self) -> Iterator[PydanticCustomError]:
        if self.visited is not None and self.stages == 1:
            yield self._misfit("visited", "needs stages above 1; leave it out, or raise stages")
        if self.visited is not None and self.visited > self.stages:
            yield self._misfit("visited", f"must be 2 to {self.stages}, the stages")

    @property
    def num_visited(self) -> int:
        """Stages of a path: three quarters of them when the spec does not say."""
        return visited_of(self.stages) if self.visited is None else self.visited


def visited_of(stages: int) -> int:
    return max(min(2, stages), stages * 3 // 4)


# --- adapters -------------------------------------------------------------------------------------
class AdapterSection(Section):
    """Small matrices beside those of a checkpoint, which stays as it is."""

    kind: Literal["lora"] = "lora"
    """Only 'lora' so far."""
    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Width of an adapter; more: more to learn, and to send."""
    alpha: Annotated[int, Field(ge=1, le=10_000)] = 32
    """What they make is scaled by alpha / rank."""
    targets: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")], ...],
        Field(max_length=MAX_LISTED),
        LIST,
    ] = ()
    """Layers that get one, as ["q_proj", "v_proj"]; none named: all of the blocks."""
    trains: Literal["both", "b"] = "both"
    """'both' matrices, or 'b': the first stays as drawn, half is sent, averages are exact."""
    base: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    """Digest of the checkpoint; set by the founder's `start`."""


# --- ways of averaging ----------------------------------------------------------------------------
class FragmentsSection(Section):
    """How a model is cut into fragments (protocol/fragment/fragments.py)."""

    fragments: Literal["strided", "sequential", "whole"] = "strided"
    """'strided' or 'sequential' blocks, or 'whole': one fragment."""
    blocks_per_fragment: Annotated[int, Field(ge=1, le=1024)] = 3
    """Transformer blocks in one fragment, at most."""


class DilocoSection(FragmentsSection):
    """Streaming DiLoCo: fragments of the model are averaged by all, each at its own moment."""

    gone: ClassVar = {"error_feedback": False}
    later: ClassVar = ("robust",)

    learning_rate: Annotated[float, Field(gt=0, le=2)] = 0.4
    """Rate of the outer optimizer, SGD with Nesterov momentum."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the outer optimizer."""
    overlap_steps: Annotated[int, Field(ge=0, le=1000)] = 1
    """Inner steps between a fragment's send and its return; 0 waits."""
    merge: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the own weights when a fragment returns; 0 takes the average."""
    late: Literal["wait", "skip"] = "wait"
    """If a fragment is late: 'wait' for it, or 'skip' it and keep training."""
    robust: Literal["clip", "trim"] = "clip"
    """Owners bound what one peer moves: 'clip' by length, 'trim' values too."""


class NolocoSection(FragmentsSection):
    """NoLoCo: what pairs average. Each fragment finds a partner of its own, at its own moment."""

    fragments: Literal["strided", "sequential", "whole"] = "whole"
    """'whole' models, or fragments of 'strided' or 'sequential' blocks."""

    def idle(self) -> dict[str, str]:
        what = "to whole models: leave it out, or set fragments"
        return {"blocks_per_fragment": what} if self.is_whole else {}

    @property
    def is_whole(self) -> bool:
        return self.fragments == "whole"


def without_streaming(tree: dict[str, Any]) -> dict[str, Any]:
    """Read [sync] as it was when fragments in pairs were a method."""
    section = tree.get("streaming") or {}
    if tree.get("method") != "streaming" and section:
        raise misfit("streaming", 'is [sync.noloco] now, with method = "noloco"', section)
    if tree.get("method") != "streaming" or not isinstance(section, dict):
        return tree
    if section.get("fragments") == "whole":
        return tree
    section = {"fragments": "strided", **section}
    return {**tree, "method": "noloco", "noloco": section, "streaming": None}
