"""Experts that this home trained before: their newest checkpoints, for those that go on with them.

An expert whose last peer has gone may have a checkpoint in the home of a peer that trains another
one now. It is served as a state of that group, and read from the disk when somebody asks.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import trio

from peer.content.service import WrittenState
from peer.content.state_file import StateManifest, write_state
from peer.facts import Facts
from peer.runtime import Work
from peer.state.checkpoints import Checkpoint, CheckpointStore
from peer.training.tensor_file import FileUnusable
from protocol.content.samples import Float32Vector
from protocol.errors import Refused
from protocol.membership.group import Group
from protocol.outcomes import RefusalReason
from protocol.run.layout import part_of_expert
from protocol.wire.content_messages import StateScalars


class KeptExpert:
    """One of them. Implements `WrittenState`."""

    def __init__(self, group: str, checkpoint: Checkpoint, work: Work) -> None:
        self.group = group
        self.checkpoint = checkpoint
        self._work = work

    @property
    def round(self) -> int:
        return self.checkpoint.manifest.round

    @property
    def step(self) -> int:
        return int(self.checkpoint.manifest.step)

    async def write(self, directory: Path) -> tuple[Path, StateManifest]:
        return await self._work.run(self._write, directory)

    def _write(self, directory: Path) -> tuple[Path, StateManifest]:
        manifest, path = self.checkpoint.manifest, directory / "1.state"
        scalars = StateScalars(
            group=self.group,
            round=manifest.round,
            step=self.step,
            layout_digest=manifest.layout_digest,
            epoch=manifest.epoch,
            position=manifest.position,
            tokens=manifest.tokens,
            gradient_norm=0.0,
        )
        return path, write_state(path, scalars, *self._vectors())

    def _vectors(self) -> tuple[Float32Vector, Float32Vector]:
        """Raises OSError."""
        size = self.checkpoint.manifest.padded_parameters
        slow_P, momentum_P = np.zeros((2, size), np.float32)
        try:
            self.checkpoint.fill(slow_P, momentum_P)
        except FileUnusable as error:
            raise OSError(0, str(error)) from error
        return slow_P, momentum_P


class KeptExperts:
    """Those of this home, but for the one that it trains now.

    Args:
        firsts: states of before an expert's first round, by the group's digest, where there is no
            later one.
    """

    def __init__(
        self,
        store: CheckpointStore,
        facts: Facts,
        work: Work,
        firsts: Mapping[str, WrittenState],
    ) -> None:
        self._store = store
        self._firsts = firsts
        self._facts = facts
        self._work = work
        self._looking = trio.Lock()
        self._found: dict[str, KeptExpert] = {}
        run, run_id = facts.several, facts.run_id
        count = 0 if run is None or run_id is None else len(run.experts)
        parts = map(part_of_expert, range(count))
        self._parts = {Group(run_id or "", part).digest: part for part in parts}

    async def of(self, group: str) -> WrittenState | None:
        """That of a group, verified once; None for a group of no expert. Raises as `_first`."""
        part, run_id = self._parts.get(group), self._facts.run_id
        if part is None or run_id is None or group == self._facts.group:
            return None
        async with self._looking:
            found = self._found.get(group)
            if found is not None and found.checkpoint.path.is_dir():
                return found
            newest = await self._work.run(self._store.newest_whole, run_id, lambda *_: None, part)
            if newest is None:
                return self._first(group)
            self._found[group] = KeptExpert(group, newest, self._work)
            return self._found[group]

    def _first(self, group: str) -> WrittenState:
        """Raises Refused: newcomers ask all of the run, so it is no request that went astray."""
        if group not in self._firsts:
            raise Refused(RefusalReason.UNAVAILABLE, "I have kept nothing of that expert")
        return self._firsts[group]
