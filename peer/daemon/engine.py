"""What the daemon needs of training, without knowing torch: the model's shape, memory, first weights, trainers.

The real one starts child processes (peer/training/process.py); a simulation puts a toy model in its place.
"""

from contextlib import AbstractContextManager, contextmanager
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from peer.training.corpus.prepare import PreparedCorpus
from peer.training.ports import Float32Vector, StartTrainer, TrainerDied
from peer.training.process import initialise_weights, inspect_model, trainer_starter
from peer.training.settings import TrainerSettings
from peer.training.shared import SharedVector
from protocol.errors import InvalidRunSpec
from protocol.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What all peers of a group have in common."""

    layout_digest: str
    parameters: int
    padded_parameters: int


class SlowWeights(Protocol):
    """Memory that the trainers of this engine can read."""

    @property
    def array(self) -> Float32Vector: ...


class Engine(Protocol):
    """Training, as the daemon sees it."""

    async def inspect(self) -> ModelShape:
        """Raises InvalidRunSpec when the model cannot be built."""

    def memory(self, padded_parameters: int) -> AbstractContextManager[SlowWeights]: ...

    async def initialise(self, slow: SlowWeights) -> None:
        """Write the founder's first weights."""

    def starter(self, slow: SlowWeights) -> StartTrainer: ...


class TorchEngine:
    """Child processes with torch."""

    def __init__(
        self,
        spec: RunSpec,
        corpus: PreparedCorpus,
        *,
        peer_id: str,
        device: str,
        threads: int,
        state_dir: Path,
    ) -> None:
        self._state_dir = state_dir
        self._settings = TrainerSettings(
            spec=spec.to_bytes(),
            peer_id=peer_id,
            corpus_path=str(corpus.path),
            vocabulary_size=corpus.vocabulary_size,
            device=device,
            threads=threads,
        )

    def __repr__(self) -> str:
        return f"<TorchEngine on {self._settings.device}, {self._settings.threads} threads>"

    async def inspect(self) -> ModelShape:
        """Raises InvalidRunSpec when the model cannot be built."""
        try:
            layout = await inspect_model(self._settings)
        except TrainerDied as died:
            raise InvalidRunSpec(f"the model cannot be built: {died}") from died
        return ModelShape(layout.digest, layout.parameters, layout.padded_parameters)

    @contextmanager
    def memory(self, padded_parameters: int) -> Iterator[SharedVector]:
        """Shared memory for the slow weights."""
        with SharedVector(padded_parameters, self._state_dir) as slow:
            yield slow

    async def initialise(self, slow: SlowWeights) -> None:
        """Write the founder's first weights. Raises InvalidRunSpec."""
        assert isinstance(slow, SharedVector)
        try:
            await initialise_weights(self._settings, slow)
        except TrainerDied as died:
            raise InvalidRunSpec(f"the first weights cannot be made: {died}") from died

    def starter(self, slow: SlowWeights) -> StartTrainer:
        """Starts trainers on these slow weights."""
        assert isinstance(slow, SharedVector)
        return trainer_starter(self._settings, slow, self._state_dir)
