"""Files that appear whole or not at all, with the modes that they are to have.

Keys, secrets and weights are their owner's alone; all else is as the user's umask says, though the
system gives files that are written aside a private mode.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

PRIVATE_FILE: Final = 0o600


def _usual() -> int:
    umask = os.umask(0o077)  # the system tells it to those alone that set another
    os.umask(umask)
    return 0o666 & ~umask


USUAL_FILE: Final = _usual()
"""The mode that `open` gives; asked for once, at the first import, before there are threads."""


@contextmanager
def replacing(path: Path, mode: int = USUAL_FILE) -> Iterator[IO[bytes]]:
    """Write a file that appears under its name when it is complete and on disk, or never.

    Raises:
        OSError: the disk refused; what was at `path` is as it was.
    """
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def private(path: str, flags: int) -> int:
    """An opener: what `open` makes with it is its owner's alone."""
    return os.open(path, flags, PRIVATE_FILE)


def replace_file(path: Path, data: bytes, mode: int = USUAL_FILE) -> None:
    """Replace `path` atomically and durably. Raises OSError."""
    with replacing(path, mode) as file:
        file.write(data)


def sync_folder(path: Path) -> None:
    """Wait until the folder's names are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
