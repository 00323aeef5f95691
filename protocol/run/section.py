"""A section of the run spec: known keys alone, never changed after it was checked."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

MAX_STEPS: Final = 1 << 40
"""Largest number of steps that a run spec may name, for any purpose: every float and every integer
on the wire and on the disk holds it.
"""
MISFIT: Final = "misfit"
"""The type of the error of a value that is wrong beside others."""


class Section(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)

    def _misfit(self, key: str, what: str) -> PydanticCustomError:
        """A value that is wrong beside the others of its section; the error names it alone."""
        return misfit(key, what, getattr(self, key))


def misfit(key: str, what: str, value: Any) -> PydanticCustomError:
    """A value that is wrong beside others.

    Args:
        key: from the section that finds it wrong, with dots where it stands in a section of that.
    """
    return PydanticCustomError(MISFIT, "{what}", {"what": what, "key": key, "value": value})


def _number_or_auto(value: object) -> object:
    """The value, if it is one or the other."""
    if value == "auto" or (type(value) is int and 1 <= value <= MAX_STEPS):
        return value
    raise PydanticCustomError(
        "number_or_auto", "must be a whole number from 1 to {most}, or 'auto'", {"most": MAX_STEPS}
    )


NumberOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto)]
