"""The section of the run spec that says how each peer trains by itself."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from .section import LIST, MAX_STEPS, Section, with_section

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
