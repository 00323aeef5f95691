"""The models that lie in the homes: whole checkpoints, by the step that their manifests say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from peer.state.checkpoints import Checkpoint, CheckpointStore
from peer.training.tensor_file import FileUnusable

ANY: Final = 3
"""Checkpoints that a store keeps; nothing is written here."""


@dataclass(frozen=True, slots=True, order=True)
class Model:
    """One whole checkpoint.

    Attributes:
        step: nominal.
        over: it is the run's last.
        written_s: wall time.
    """

    step: int
    over: bool
    written_s: float
    home: str
    path: str


NOTHING: Final = Model(-1, False, 0.0, "", "")


class Models:
    """What a restart would consider, in all homes.

    Args:
        folders: of checkpoints, by the home's name.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._stores = {name: CheckpointStore(path, ANY) for name, path in folders.items()}
        self._verified = dict[tuple[Path, float], bool]()

    def all(self) -> Sequence[Model]:
        """Every one whose files are what its manifest says."""
        return [
            Model(
                int(found.manifest.step),
                found.manifest.over,
                found.manifest.written_s,
                name,
                found.path.name,
            )
            for name, store in self._stores.items()
            for found in store.newest_first(_not_whole)
            if self._is_whole(found)
        ]

    def newest(self) -> Model:
        """The one of the highest step.

        It is looked for twice: while the list is read, a checkpoint may make way for a newer one.
        """
        return max((model for _ in range(2) for model in self.all()), default=NOTHING)

    def _is_whole(self, checkpoint: Checkpoint) -> bool:
        key = checkpoint.path, checkpoint.manifest.written_s
        if not self._verified.get(key, False):
            try:
                checkpoint.verify()
            except (FileUnusable, OSError):
                return False
            self._verified[key] = True
        return True


def _not_whole(path: Path, why: str) -> None:
    """One that a restart would refuse counts for nothing here."""
