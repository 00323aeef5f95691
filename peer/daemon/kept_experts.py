"""Experts whose weights this home keeps and does not train: states for those that come to them.

An expert whose last peer has gone may have a checkpoint in the home of a peer that trains another
one now. First weights of an expert that begins from a checkpoint are with the founder alone, which
keeps them as they were when the run was founded; they are given as the state of the expert's group
before its first round, until somebody trains it. The signed run spec names their digest, so nobody
else's are believed. Both are read from the disk when somebody asks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import blake3
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
from protocol.run.run_spec import RunSpec
from protocol.wire.content_messages import StateScalars


def weights_file(state_dir: Path, number: int) -> Path:
    """The file in which the founder keeps first weights of an expert."""
    return state_dir / f"first-weights-{number}.f32"


def digest_of_weights(slow_P: Float32Vector) -> str:
    return blake3.blake3(slow_P.astype("<f4", copy=False).data.cast("B")).hexdigest()


def kept_first_weights(run: RunSpec, state_dir: Path) -> dict[int, Path]:
    """Files of first weights that are here, by the expert's number."""
    paths = {number: weights_file(state_dir, number) for number in range(len(run.experts))}
    return {number: path for number, path in paths.items() if path.is_file()}


@dataclass(frozen=True)
class StoredState:
    """A state on the disk, of a group that is not ours. Implements `WrittenState`.

    Attributes:
        read: gives slow weights and outer momentum. Raises OSError.
    """

    scalars: StateScalars
    read: Callable[[], tuple[Float32Vector, Float32Vector]]
    work: Work

    @property
    def group(self) -> str:
        return self.scalars.group

    @property
    def round(self) -> int:
        return self.scalars.round

    @property
    def step(self) -> int:
        return self.scalars.step

    async def write(self, directory: Path) -> tuple[Path, StateManifest]:
        return await self.work.run(self._write, directory / f"{self.step}.state")

    def _write(self, path: Path) -> tuple[Path, StateManifest]:
        return path, write_state(path, self.scalars, *self.read())


def first_state(group: str, path: Path, layout_digest: str, work: Work) -> StoredState:
    """The state of a group before its first round, whose slow weights lie in a file."""

    def read() -> tuple[Float32Vector, Float32Vector]:
        slow_P: Float32Vector = np.fromfile(path, "<f4")
        return slow_P, np.zeros_like(slow_P)

    return StoredState(StateScalars(group, -1, 0, layout_digest, 0, 0, 0, 0.0), read, work)


def vectors_of(checkpoint: Checkpoint) -> tuple[Float32Vector, Float32Vector]:
    """Raises OSError."""
    slow_P, momentum_P = np.zeros((2, checkpoint.manifest.padded_parameters), np.float32)
    try:
        checkpoint.fill(slow_P, momentum_P)
    except FileUnusable as error:
        raise OSError(0, str(error)) from error
    return slow_P, momentum_P


class KeptExperts:
    """The states of experts in this home, except the one that it trains now.

    Args:
        firsts: files of first weights, by the expert's number.
    """

    def __init__(
        self, store: CheckpointStore, facts: Facts, work: Work, firsts: Mapping[int, Path]
    ) -> None:
        self._store = store
        self._firsts = firsts
        self._facts = facts
        self._work = work
        self._looking = trio.Lock()
        self._found: dict[str, Checkpoint] = {}
        run, run_id = facts.expert_run, facts.run_id
        count = 0 if run is None or run_id is None else len(run.experts)
        numbers = {number: Group(run_id or "", part_of_expert(number)) for number in range(count)}
        self._numbers = {group.digest: number for number, group in numbers.items()}

    async def of(self, group: str) -> WrittenState | None:
        """A group's state, verified once; None for a group of no expert. Raises as `_first`."""
        number, run_id = self._numbers.get(group), self._facts.run_id
        if number is None or run_id is None or group == self._facts.group:
            return None
        async with self._looking:
            found = self._found.get(group)
            if found is None or not found.path.is_dir():
                of_it = run_id, lambda *_: None, part_of_expert(number)
                found = await self._work.run(self._store.newest_whole, *of_it)
            if found is None:
                return self._first(group, number)
            self._found[group] = found
        manifest = found.manifest
        scalars = StateScalars(
            group,
            manifest.round,
            int(manifest.step),
            manifest.layout_digest,
            manifest.epoch,
            manifest.position,
            manifest.tokens,
            0.0,
        )
        return StoredState(scalars, partial(vectors_of, found), self._work)

    def _first(self, group: str, number: int) -> WrittenState:
        """Raises Refused: newcomers ask all of the run, so it is no request that went astray."""
        if number not in self._firsts:
            raise Refused(RefusalReason.UNAVAILABLE, "I have kept nothing of that expert")
        assert self._facts.expert_run is not None
        frozen = self._facts.expert_run.experts[number].frozen
        assert frozen is not None, "the run was founded"
        return first_state(group, self._firsts[number], frozen.layout_digest, self._work)
