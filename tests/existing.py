"""What a test knows to be there."""

from typing import TypeVar

Value = TypeVar("Value")


def existing(value: Value | None) -> Value:
    """The value; where there is none, the test fails here."""
    assert value is not None
    return value
