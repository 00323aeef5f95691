"""Power loss: what gets its name is on the disk before, and the name is there after.

No test can cut the power. What the kernel is asked is recorded instead: which files and folders
were synced, and what was renamed when.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from checkpoint_worlds import P, write

from peer.content.state_file import write_state
from peer.runtime.files import replace_file
from peer.state.checkpoints import CheckpointStore
from protocol.wire.content_messages import StateScalars


class Disk:
    """What lasts when the power fails: files and folders as they were when they were synced."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.synced: set[Path] = set()
        self.names_lost: set[Path] = set()
        self.torn: list[str] = []
        self._fsync = os.fsync
        patched.setattr(os, "fsync", self._sync)
        for name in ("rename", "replace"):
            patched.setattr(os, name, self._renaming(getattr(os, name)))

    def _sync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        self.synced.add(path)
        self.names_lost = {lost for lost in self.names_lost if lost.parent != path}
        self._fsync(descriptor)

    def _renaming(self, rename):
        def renamed(source: Path | str, target: Path | str) -> None:
            source, target = Path(source), Path(target)
            wanted = [source, *source.iterdir()] if source.is_dir() else [source]
            self.torn += [path.name for path in wanted if path not in self.synced]
            rename(source, target)
            self.synced |= {target / path.relative_to(source) for path in wanted}
            self.names_lost.add(target)

        return renamed


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_file_of_the_home_outlives_the_power(disk: Disk, tmp_path: Path) -> None:
    replace_file(tmp_path / "admission", b"rulings")
    assert (disk.torn, disk.names_lost) == ([], set())


def test_a_state_outlives_the_power(disk: Disk, tmp_path: Path) -> None:
    vector = np.zeros(P, np.float32)
    scalars = StateScalars("ab" * 16, 3, 180, "layout", 0, 0, 99, 0.5)
    write_state(tmp_path / "a.state", scalars, vector, vector)
    assert (disk.torn, disk.names_lost) == ([], set())


def test_a_checkpoint_outlives_the_power_whole(disk: Disk, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    written = write(store)
    assert (disk.torn, disk.names_lost) == ([], set())
    store.set_aside(written, 0.0)
    assert disk.names_lost == set()
