"""The real Work and Entropy."""

import os
from collections.abc import Callable
from typing import Any, Final, TypeVar

import trio

T = TypeVar("T")
MAX_WORKERS: Final = 4
"""Threads that may do blocking work at once."""


class RealWork:
    """Blocking work on threads of trio's, at most `MAX_WORKERS` at once.

    Cancelling waits for the function to return: it may still hold memory that the caller owns. One
    that takes long looks at `check_cancelled` now and then. One that may be cut off is left to
    itself, and ends with the process.
    """

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(MAX_WORKERS)

    async def run(self, function: Callable[..., T], *args: Any, may_be_cut_off: bool = False) -> T:
        """`function(*args)` on a thread."""
        return await trio.to_thread.run_sync(
            function, *args, abandon_on_cancel=may_be_cut_off, limiter=self._limiter
        )

    def check_cancelled(self) -> None:
        """Raises trio.Cancelled on a thread whose `run` was cancelled."""
        trio.from_thread.check_cancelled()


class RealEntropy:
    """The operating system's randomness."""

    def token_bytes(self, n: int) -> bytes:
        """`n` unpredictable bytes."""
        return os.urandom(n)
