"""A section of the run spec: known keys alone, never changed after it was checked."""

from typing import Any, Final

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

MISFIT: Final = "misfit"
"""The type of the error of a value that is wrong beside others."""


class Section(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    def _misfit(self, key: str, what: str) -> PydanticCustomError:
        """A value that is wrong beside the others of its section; the error names it alone."""
        return misfit(key, what, getattr(self, key))


def misfit(key: str, what: str, value: Any) -> PydanticCustomError:
    """A value that is wrong beside others.

    Args:
        key: from the section that finds it wrong, with dots where it stands in a section of that.
    """
    return PydanticCustomError(MISFIT, "{what}", {"what": what, "key": key, "value": value})
