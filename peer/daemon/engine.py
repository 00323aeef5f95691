"""What the daemon needs of training, without knowing torch: memory, first weights, trainers.

The real one starts child processes (peer/training/process.py); a simulation puts a toy model in its
place.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from peer.ports import Work
from peer.training.child_process import SpareChild
from peer.training.ports import Float32Vector, StartTrainer
from peer.training.process import trainer_starter
from peer.training.settings import TrainerSettings
from peer.training.shared import SharedVector


class SlowWeights(Protocol):
    """Memory that the trainers of this engine can read."""

    @property
    def array(self) -> Float32Vector: ...


class Engine(Protocol):
    """Training, as the daemon sees it."""

    def memory(self, padded_parameters: int) -> AbstractContextManager[SlowWeights]: ...

    async def initialise(self, slow: SlowWeights) -> None:
        """Write the first weights of a group."""

    def starter(self, slow: SlowWeights) -> StartTrainer: ...


class TorchEngine:
    """Child processes with torch.

    Args:
        first_weights: the founder's file of initial weights; None for a joiner.
        memory_dir: for shared memory on systems where it needs a file.
        spare: a child for the first trainer.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        work: Work,
        memory_dir: Path,
        first_weights: Path | None = None,
        spare: SpareChild | None = None,
    ) -> None:
        self._settings = settings
        self._work = work
        self._memory_dir = memory_dir
        self._first_weights = first_weights
        self._spare = spare

    def __repr__(self) -> str:
        return f"<TorchEngine on {self._settings.device}, {self._settings.threads} threads>"

    @contextmanager
    def memory(self, padded_parameters: int) -> Iterator[SharedVector]:
        """Shared memory for the slow weights."""
        with SharedVector(padded_parameters, self._memory_dir) as slow:
            yield slow

    async def initialise(self, slow: SlowWeights) -> None:
        """Write the founder's first weights; their file is not needed after that."""
        path = self._first_weights
        assert path is not None
        slow.array[:] = await self._work.run(np.fromfile, path, "<f4")
        path.unlink()

    def starter(self, slow: SlowWeights) -> StartTrainer:
        """Starts trainers on these slow weights."""
        assert isinstance(slow, SharedVector)
        return trainer_starter(self._settings, slow, self._memory_dir, self._spare)
