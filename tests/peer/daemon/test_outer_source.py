"""The state that joiners fetch: one state, and no outer step waits for digests or the disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import trio
from trio.testing import MockClock

from peer.content.state_file import copy_state, seal_state
from peer.daemon.peer import OuterSource
from peer.facts import Facts

P = 256


class Averaging:
    """As much of a way of averaging as the source looks at."""

    round = 3

    def __init__(self) -> None:
        self.slow_P = np.ones(P, np.float32)
        self.momentum_P = np.zeros(P, np.float32)
        self.lock = trio.Lock()


class WatchedWork:
    """Runs work in place, and notes whether the lock was held meanwhile."""

    def __init__(self, lock: trio.Lock) -> None:
        self._lock = lock
        self.held: dict[Callable[..., Any], bool] = {}

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        await trio.lowlevel.checkpoint()
        self.held[function] = self._lock.locked()
        return function(*args)


async def test_only_the_copy_is_made_under_the_lock(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    averaging: Any = Averaging()
    work: Any = WatchedWork(averaging.lock)
    source = OuterSource(averaging, Facts("me", 1), work)
    path, manifest = await source.write(tmp_path)
    assert work.held == {copy_state: True, seal_state: False}
    assert path.is_file()
    assert manifest.scalars.round == 3
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
