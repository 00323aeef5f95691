"""Making what was renamed in a folder last."""

import os
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Wait until the folder's names are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
