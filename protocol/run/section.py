"""A section of the run spec: known keys alone, never changed after it was checked."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

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
