"""Work inline."""

from collections.abc import Callable
from typing import Any, TypeVar

import trio

from peer.runtime import ProcessorTime

T = TypeVar("T")


class SimulatedWork:
    """Work done inline, taking `duration_s` of virtual time."""

    def __init__(self, duration_s: float = 0.0) -> None:
        self._duration_s = duration_s

    def processor_time(self, pid: int | None) -> ProcessorTime:
        return ProcessorTime(0.0, 0.0)

    async def run(self, function: Callable[..., T], *args: Any, may_be_cut_off: bool = False) -> T:
        await trio.lowlevel.checkpoint()
        result = function(*args)
        with trio.CancelScope(shield=not may_be_cut_off):
            await trio.sleep(self._duration_s)
        return result

    def check_cancelled(self) -> None:
        """Do nothing: a function takes no time here, so nothing is cancelled meanwhile."""
