"""The state files that a source keeps for joiners, and which of them a joiner is given.

A state is written when a joiner asks and the newest one is of an earlier round. A joiner on a thin
line reads for longer than rounds last, so a state that is being read is *pinned*: it stays until
its last reader is through or gone. Two files are kept, so

  1. a joiner is given the state of the present round, as long as there is room to write it;
  2. where the files that there is room for are all being read, it is given the newest of them that
     is of use to it, and no new one is written: slow joiners never take each other's state away;
  3. where none of them is, it is refused, and asks another source, or later.

Pins are bounded by the places of readers, and by their pace (service.py): a reader that asks for
nothing, or takes nothing, loses its place and its pin.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import trio

from peer.ports import Work
from protocol.run.needs import KEPT_STATES

from .state_file import StateManifest, remove_state_files


class StateSource(Protocol):
    """An owner of the outer state of a group, which the service serves."""

    @property
    def group(self) -> str:
        """Digest of the group."""

    @property
    def round(self) -> int:
        """Round of its last outer step; -1 before the first."""

    @property
    def step(self) -> int:
        """The nominal step that the owner is at."""

    async def sample(self, seed: bytes) -> bytes:
        """Its weights at the places that follow from the seed, as bytes."""

    async def write(self, directory: Path) -> tuple[Path, StateManifest]:
        """Write the present state to a new file in `directory`."""


@dataclass(slots=True, eq=False)
class KeptState:
    """One state file, and by how many it is being read."""

    path: Path
    manifest: StateManifest
    readers: int = 0


class KeptStates:
    """See the top of the file."""

    def __init__(self, directory: Path, work: Work) -> None:
        self._directory = directory
        self._work = work
        self._by_root: OrderedDict[str, KeptState] = OrderedDict()
        self._writing = trio.Lock()
        remove_state_files(directory, keep=())

    def get(self, root: str) -> KeptState | None:
        """The state of this root, if it is kept."""
        return self._by_root.get(root)

    async def newest(self, source: StateSource) -> KeptState:
        """The state as it stands after the last outer step. Raises OSError."""
        async with self._writing:
            return await self._present(source)

    @contextmanager
    def reading(self, state: KeptState) -> Iterator[None]:
        """Keep this state until the context ends."""
        state.readers += 1
        try:
            yield
        finally:
            state.readers -= 1

    async def for_reader(self, source: StateSource, minimum_step: int) -> KeptState | None:
        """What a joiner is given; None where there is nothing for it now. Raises OSError.

        Args:
            minimum_step: nominal step of the oldest state that is of use to it.
        """
        async with self._writing:
            if self._is_present(source) or self._num_pinned() < KEPT_STATES:
                return await self._present(source)
            kept = [state for state in self._by_root.values() if state.readers]
            steps = [state.manifest.scalars.step for state in kept]
            return kept[-1] if max(steps) >= minimum_step else None

    def _num_pinned(self) -> int:
        return sum(bool(state.readers) for state in self._by_root.values())

    def _is_present(self, source: StateSource) -> bool:
        newest = next(reversed(self._by_root.values()), None)
        return newest is not None and newest.manifest.scalars.round == source.round

    async def _present(self, source: StateSource) -> KeptState:
        if not self._is_present(source):
            path, manifest = await source.write(self._directory)
            self._by_root[manifest.root.hex()] = KeptState(path, manifest)
            idle = [root for root, state in self._by_root.items() if not state.readers]
            for root in idle[:-1]:
                if len(self._by_root) > KEPT_STATES:
                    del self._by_root[root]
            kept = [state.path for state in self._by_root.values()]
            await self._work.run(remove_state_files, self._directory, kept)
        return next(reversed(self._by_root.values()))
