"""The folder of an export: what marks it as one, and what is never written over."""

import json
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


def stages_of_export(folder: Path) -> int:
    """Stages of the pipeline that trained it; 1 without one.

    Raises ValueError: the folder holds no export; OSError.
    """
    if not (folder / MARKER).is_file():
        raise ValueError(f"{folder} is not an export: 'loco-peer export --hf DIR' makes one")
    return int(json.loads((folder / MARKER).read_text()).get("stages", 1))
