"""Work on threads."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import psutil
import trio

from . import ProcessorTime

T = TypeVar("T")
MAX_WORKERS: Final = 4
"""Threads that may do blocking work at once."""
_SCHEDULED: Final = 2
"""Linux: with a process id, the clock that clock_getcpuclockid(3) gives for that process."""


class RealWork:
    """Blocking work on threads of trio's, at most `MAX_WORKERS` at once.

    Cancelling waits for the function to return: it may still hold memory that the caller owns. One
    that may be cut off is left to itself, and ends with the process.
    """

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(MAX_WORKERS)

    def processor_time(self, pid: int | None) -> ProcessorTime:
        taken_s, machine = time.process_time(), psutil.cpu_times()
        if pid is not None:
            with suppress(OSError):  # it has gone, or this is not Linux
                taken_s += time.clock_gettime(~pid << 3 | _SCHEDULED)
        return ProcessorTime(taken_s, machine.idle + getattr(machine, "iowait", 0.0))

    async def run(self, function: Callable[..., T], *args: Any, may_be_cut_off: bool = False) -> T:
        return await trio.to_thread.run_sync(
            function, *args, abandon_on_cancel=may_be_cut_off, limiter=self._limiter
        )

    def check_cancelled(self) -> None:
        trio.from_thread.check_cancelled()
