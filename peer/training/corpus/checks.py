"""Whether work on a thread, which may take hours, is still wanted."""

from collections.abc import Callable

Check = Callable[[], None]
"""Raises when the caller is cancelled (`Work.check_cancelled`); called every now and then."""


def go_on() -> None:
    """The check of a caller that nobody cancels."""
