"""The output folder: cleared only if a demo made it, and used by one demo at a time."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

MARKER: Final = ".made-by-loco-peer-demo"
"""An empty file that says that everything beside it may be removed."""


class FolderRefused(Exception):
    """The output folder cannot be used; the message says why."""


@contextmanager
def demo_folder(path: Path) -> Iterator[None]:
    """An empty folder of ours at `path`, for as long as the block lasts.

    Raises:
        FolderRefused: something else lies there, or another demo uses it.
    """
    try:
        file = _open_marker(path)
    except OSError as error:
        raise FolderRefused(f"cannot use {path}: {error.strerror or error}") from error
    with file:
        _lock(file.fileno(), path)
        _clear(path)
        yield


def _open_marker(path: Path) -> TextIO:
    marker = path / MARKER
    if path.is_dir() and any(path.iterdir()) and not marker.is_file():
        raise FolderRefused(
            f"{path} holds files that no demo made; name another folder with --out DIR"
        )
    path.mkdir(parents=True, exist_ok=True)
    return marker.open("a")


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FolderRefused(f"another demo is running in {path}") from error


def _clear(path: Path) -> None:
    for entry in path.iterdir():
        if entry.name == MARKER:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
