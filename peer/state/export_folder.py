"""The folder of an export: what marks it as one, and what is never written over."""

from pathlib import Path
from typing import Final

MARKER: Final = "loco_peer.json"


def check_export_folder(folder: Path) -> None:
    """Raises FileExistsError: the folder holds something that is not an export."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"{folder} is not a folder")
    if any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise FileExistsError(f"{folder} is not empty and not an export: choose another folder")
