"""What the daemon needs of training, without knowing torch: memory and trainers.

The real one starts child processes (peer/training/process.py); a simulation puts a toy model in its
place.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from peer.training.child_process import SpareChild
from peer.training.messages import TrainerSettings
from peer.training.ports import Float32Vector, StartTrainer
from peer.training.process import trainer_starter
from peer.training.shared import SharedVector


class SlowWeights(Protocol):
    """Memory that the trainers of this engine can read."""

    @property
    def array(self) -> Float32Vector: ...


class Engine(Protocol):
    """Training, as the daemon sees it."""

    def memory(self, padded_parameters: int) -> AbstractContextManager[SlowWeights]: ...

    def starter(self, slow: SlowWeights) -> StartTrainer: ...


class TorchEngine:
    """Child processes with torch.

    Args:
        memory_dir: for shared memory on systems where it needs a file.
        spare: a child for the first trainer.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        memory_dir: Path,
        spare: SpareChild | None = None,
    ) -> None:
        self._settings = settings
        self._memory_dir = memory_dir
        self._spare = spare

    @contextmanager
    def memory(self, padded_parameters: int) -> Iterator[SharedVector]:
        """Shared memory for the slow weights."""
        with SharedVector(padded_parameters, self._memory_dir) as slow:
            yield slow

    def starter(self, slow: SlowWeights) -> StartTrainer:
        """Starts trainers on these slow weights."""
        assert isinstance(slow, SharedVector)
        return trainer_starter(self._settings, slow, self._memory_dir, self._spare)
