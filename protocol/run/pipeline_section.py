"""The section of the run spec for a model that is cut into stages over machines.

The words are those of the planner (protocol/pipeline/problem.py), which explains the rules of paths
(CC1 to CC3). The limits differ between the published versions of SkipPipe:

                                  max_swaps  max_swap_distance  max_swap_sum  max_jump
    first release (February 2025)     1              1               2           -
    last release (July 2025)          2              1               2           4
    later fork (November 2025)        0              0               0           3

The defaults are those of the last release, but for swaps: there are none, as in the later fork,
since they cost learning and saved no time (docs/results/pipeline_learning.md). Raising `max_swaps`
alone gives those of the last release. The later fork lets every tenth iteration skip nothing
(`full_every`); the releases have no such rule.
"""

from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from protocol.limits import MAX_STAGES

from .section import Section

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
