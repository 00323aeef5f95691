"""Sections of the run spec: known keys alone, never changed after they were checked.

Below [sync] lie those of the ways of averaging (ways.py): keys that one way has for itself.

The words of [pipeline] are those of the planner (protocol/pipeline/problem.py), which explains the
rules of paths (CC1 to CC3). The limits differ between the published versions of SkipPipe:

                                  max_swaps  max_swap_distance  max_swap_sum  max_jump
    first release (February 2025)     1              1               2           -
    last release (July 2025)          2              1               2           4
    later fork (November 2025)        0              0               0           3

The defaults are those of the last release, but for swaps: there are none, as in the later fork,
since they cost learning and saved no time (docs/results/pipeline_learning.md). Raising `max_swaps`
alone gives those of the last release. The later fork lets every tenth iteration skip nothing
(`full_every`); the releases have no such rule.
"""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from protocol.address.peer_id import public_key_from_peer_id
from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_STAGES

# --- any section ----------------------------------------------------------------------------------
MAX_STEPS: Final = 1 << 40
"""Largest number of steps that a run spec may name, for any purpose: every float and every integer
on the wire and on the disk holds it.
"""
LIST: Final = Field(strict=False)
"""Marks a tuple that is written as a list; what is in it stays strict."""
MISFIT: Final = "misfit"
"""The type of the error of a value that is wrong beside others."""


class Section(BaseModel):
    """What all sections have in common.

    Kinds are strict: `true` is no number, and `"8"` none either, whatever Python makes of them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def _misfit(self, key: str, what: str) -> PydanticCustomError:
        """A value that is wrong beside the others of its section; the error names it alone."""
        return misfit(key, what, getattr(self, key))


def misfit(key: str, what: str, value: Any) -> PydanticCustomError:
    """A value that is wrong beside others.

    Args:
        key: from the section that finds it wrong, with dots where it stands in a section of that.
    """
    return PydanticCustomError(MISFIT, "{what}", {"what": what, "key": key, "value": value})


def with_section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """The tree, with all defaults in this section where it says nothing of it."""
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
    """The value, if it is one or the other."""
    if value == "auto" or (type(value) is int and 1 <= value <= MAX_STEPS):
        return value
    raise PydanticCustomError(
        "number_or_auto", "must be a whole number from 1 to {most}, or 'auto'", {"most": MAX_STEPS}
    )


NumberOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto)]


# --- admission ------------------------------------------------------------------------------------
MAX_LISTED: Final = 1024


def _peer_id(text: str) -> str:
    try:
        public_key_from_peer_id(text)
    except RemoteProtocolError as error:
        raise ValueError(f"not a peer id ({error}); `loco-peer status` shows that of a home") from (
            error
        )
    return text


class AdmissionSection(Section):
    """Which peers may join."""

    mode: Literal["open", "invite", "list"] = "open"
    """Everybody, holders of an invitation, or the peers that are named here."""
    peers: Annotated[
        tuple[Annotated[str, AfterValidator(_peer_id)], ...], Field(max_length=MAX_LISTED), LIST
    ] = ()
    """Peer ids that may join in any case."""
    secret_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Digest of the run's secret; set by the founder's `start` where not everybody may join."""

    @model_validator(mode="after")
    def _open_names_nobody(self) -> Self:
        if self.mode == "open" and self.peers:
            raise self._misfit(
                "peers", "an open run takes everybody; set mode to 'list' or leave it out"
            )
        return self


# --- optimizer ------------------------------------------------------------------------------------
_Beta = Annotated[float, Field(ge=0, lt=1)]


class MuonSection(Section):
    """Muon, for the matrices of the blocks; AdamW trains embeddings, head and norms."""

    learning_rate: Annotated[float, Field(gt=0, lt=10)] | None = None
    """Peak for the matrices of the blocks; that of AdamW when not given."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """What scales a step, by torch's names (peer/training/optimizer.py)."""


class OptimizerSection(Section):
    """The inner optimizer and its schedule, all in nominal steps."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0, lt=10)] = 3e-3
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 60
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """WSD only: the last part of the run over which the rate falls."""
    betas: Annotated[tuple[_Beta, _Beta], LIST] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    muon: MuonSection | None = None
    """With `name = "muon"` only, and then never None."""

    @model_validator(mode="before")
    @classmethod
    def _with_section(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and tree.get("name") == "muon":
            return with_section(tree, "muon")
        return tree

    @model_validator(mode="after")
    def _keys_of_the_optimizer(self) -> Self:
        if self.muon is not None and self.name != "muon":
            raise self._misfit("name", '[optimizer.muon] needs name = "muon"')
        return self


# --- pipeline -------------------------------------------------------------------------------------
BoundaryCodec = Literal["fp32", "bf16", "int8"]
"""Each takes half the bytes of the one before."""
BOUNDARY_BITS: Final = {"fp32": 32, "bf16": 16, "int8": 8}
"""Bits of a value, scales left out."""


def _not_int4(codec: object) -> object:
    """The codec, unless it is the one that was taken out (docs/results/pipeline_learning.md)."""
    if codec == "int4":
        raise PydanticCustomError(
            "removed",
            "int4 between stages cost learning and saved no time: use 'int8', or loco-peer 0.1.0,"
            " the last that has it, for a run that was founded with it",
        )
    return codec


class PipelineSection(Section):
    """Stages over machines, and what microbatches may skip."""

    stages: Annotated[int, Field(ge=1, le=MAX_STAGES)] = 1
    """Parts of the model, each on machines of its own; 1 is no pipeline."""
    visited: Annotated[int, Field(ge=2, le=MAX_STAGES)] | None = None
    """Stages that a microbatch passes through, the first among them; see `num_visited`."""
    max_swaps: Annotated[int, Field(ge=0, le=MAX_STAGES)] = 0
    """Visits of a path to a stage below one that it has passed already."""
    max_swap_distance: Annotated[int, Field(ge=0, le=MAX_STAGES)] = 1
    """How far below."""
    max_swap_sum: Annotated[int, Field(ge=0, le=MAX_STAGES**2)] = 2
    """All distances of a path together."""
    max_jump: Annotated[int, Field(ge=1, le=MAX_STAGES)] = 4
    """From the highest stage that was passed to the next one."""
    full_every: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Every so many iterations, one skips nothing; 0 is never."""
    codec: Annotated[BoundaryCodec, BeforeValidator(_not_int4)] = "bf16"
    """What travels between stages."""
    routing: Literal["planned", "random"] = "planned"
    """How paths are chosen: from measured links, or by draws that look at none."""

    @model_validator(mode="after")
    def _visited_are_stages(self) -> Self:
        if self.visited is None:
            return self
        if self.stages == 1:
            raise self._misfit("visited", "needs stages above 1; leave it out, or raise stages")
        if self.visited > self.stages:
            raise self._misfit("visited", f"must be 2 to {self.stages}, the stages")
        return self

    @property
    def num_visited(self) -> int:
        """Stages of a path: three quarters of them when the spec does not say."""
        return visited_of(self.stages) if self.visited is None else self.visited


def visited_of(stages: int) -> int:
    """How many of these stages a path visits, where nobody has said."""
    return max(min(2, stages), stages * 3 // 4)


# --- ways of averaging ----------------------------------------------------------------------------
FEEDBACK_GONE: Final = (
    "error feedback is gone: loco-peer 0.1.0 had it last, in commit 6613df92; go on with the run in"
    " that, or found a new one without the key"
)


class FragmentsSection(Section):
    """How a model is cut into fragments (protocol/fragment/fragments.py)."""

    fragments: Literal["strided", "sequential", "whole"] = "strided"
    """How blocks are put together; `whole` is one fragment of everything."""
    blocks_per_fragment: Annotated[int, Field(ge=1, le=1024)] = 3
    """At most so many transformer blocks in one fragment."""


class DilocoSection(FragmentsSection):
    """Streaming DiLoCo: fragments of the model are averaged by all, each at its own moment."""

    learning_rate: Annotated[float, Field(gt=0, le=2)] = 0.4
    """The outer optimizer's (SGD with Nesterov momentum)."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    overlap_steps: Annotated[int, Field(ge=0, le=1000)] = 1
    """tau: inner steps between the send of a fragment and its return; 0 waits for it at once. A
    peer may have its own."""
    merge: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the own weights when a fragment comes back (the paper's alpha); 0 takes the average
    alone, 1 none of it."""
    late: Literal["wait", "skip"] = "wait"
    """When a fragment is not back after `overlap_steps`: wait for it, or train on and merge it when
    it comes."""
    robust: Literal["clip", "trim"] = "clip"
    """How owners bound what one contribution moves: by its length, or by that and by leaving out
    the highest and lowest values of each coordinate."""

    @model_validator(mode="before")
    @classmethod
    def _without_feedback(cls, tree: Any) -> Any:
        """Take out a key that is gone: signed bytes have it, and at `false` it said nothing."""
        if not isinstance(tree, dict):
            return tree
        if (feedback := tree.get("error_feedback", False)) is not False:
            raise misfit("error_feedback", FEEDBACK_GONE, feedback)
        return {key: value for key, value in tree.items() if key != "error_feedback"}


STREAMING_WHOLE_GONE: Final = (
    "one fragment of everything in the middle of rounds is gone: loco-peer 0.1.0 had it last;"
    " go on with the run in that, or found a new one with sync.noloco.fragments = 'whole'"
)


class NolocoSection(FragmentsSection):
    """NoLoCo: what pairs average. Each fragment finds a partner of its own, at its own moment."""

    fragments: Literal["strided", "sequential", "whole"] = "whole"
    """How blocks are put together; `whole` is the model, sent at the close of a round."""

    @model_validator(mode="after")
    def _whole_has_no_blocks(self) -> Self:
        if self.is_whole and self.blocks_per_fragment != (
            type(self).model_fields["blocks_per_fragment"].default
        ):
            what = "says nothing to whole models: leave it out, or set fragments"
            raise self._misfit("blocks_per_fragment", what)
        return self

    @property
    def is_whole(self) -> bool:
        """Whether the whole model is one fragment."""
        return self.fragments == "whole"


def without_streaming(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree of [sync] as it was signed, or written, when fragments in pairs were a method."""
    method, section = tree.get("method"), tree.get("streaming")
    tree = {key: value for key, value in tree.items() if key != "streaming"}
    if method != "streaming":
        if section is not None:
            raise misfit("streaming", 'is [sync.noloco] now, with method = "noloco"', section)
        return tree
    section = {"fragments": "strided", **(section or {})}
    if section["fragments"] == "whole":
        raise misfit("streaming.fragments", STREAMING_WHOLE_GONE, "whole")
    return {**tree, "method": "noloco", "noloco": section}
