"""Keys that one way of averaging has for itself: the sections below [sync] (ways.py)."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from .section import Section, misfit

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


class StreamingSection(FragmentsSection):
    """Streaming gossip: each fragment finds a partner of its own, at its own moment."""
