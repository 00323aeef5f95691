"""The one place where time is virtual and trio's scheduler follows a seed.

trio shuffles the tasks that can run, and has no public seed for that, only the switch that its
tests use, which is turned here and turned back. A simulation is then a function of its seed: the
same versions on the same machine make the same event log, byte for byte. (One torch thread, because
sums must be taken in one order.) The clock jumps as soon as every task waits.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import torch
import trio
from trio._core import _run as scheduler
from trio.testing import MockClock

T = TypeVar("T")

MAX_VIRTUAL_S: Final = 30 * 24 * 3600.0
"""A simulation that has not ended by then hangs."""


class SimulationHangs(AssertionError): ...


def run_in_virtual_time(
    seed: int, body: Callable[[], Awaitable[T]], *, limit_s: float = MAX_VIRTUAL_S
) -> T:
    """Run `body` under a seeded scheduler and a clock that jumps. Raises SimulationHangs."""

    async def bounded() -> T:
        try:
            with trio.fail_after(limit_s):
                return await body()
        except trio.TooSlowError:
            raise SimulationHangs(f"not over after {limit_s:g} s of virtual time") from None

    with _seeded(seed):
        return trio.run(bounded, clock=MockClock(autojump_threshold=0))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    state, threads = scheduler._r.getstate(), torch.get_num_threads()
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    scheduler._r.seed(seed)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        scheduler._r.setstate(state)
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
