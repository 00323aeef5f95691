"""The folder of an export: what marks it as one, and what is never written over.

A run with experts has a folder in it for each, and `ensemble.json`: how they answer together
(protocol/experts/ensemble.py), and the digests of their weights. `ensemble.py` beside it reads all
of it, and needs nothing of loco-peer.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from protocol.run.run_spec import NONE, RunSpec

MARKER: Final = "loco_peer.json"
ENSEMBLE_FILE: Final = "ensemble.json"
READER_FILE: Final = "ensemble.py"
WEIGHTS_FILE: Final = "model.safetensors"
_READER: Final = Path(__file__).with_name("ensemble_reader.py")


def check_export_folder(folder: Path) -> None:
    """Raises FileExistsError: the folder holds something that is not an export."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"{folder} is not a folder")
    marks = (folder / MARKER, folder / ENSEMBLE_FILE)
    if any(folder.iterdir()) and not any(mark.is_file() for mark in marks):
        raise FileExistsError(f"{folder} is not empty and not an export: choose another folder")


def stages_of_export(folder: Path) -> int:
    """Stages of the pipeline that trained it; 1 without one.

    Raises ValueError: the folder holds no export; OSError.
    """
    if not (folder / MARKER).is_file():
        raise ValueError(f"{folder} is not an export: 'loco-peer export --hf DIR' makes one")
    return int(json.loads((folder / MARKER).read_text()).get("stages", 1))


def holds_experts(folder: Path) -> bool:
    return (folder / ENSEMBLE_FILE).is_file()


def write_ensemble(folder: Path, run: RunSpec, numbers: Iterable[int]) -> None:
    """Make an ensemble of these experts, whose exports lie in the folder. Raises OSError."""
    rules = run.ensemble
    assert rules is not None
    told = {
        "run": run.name,
        "tokenizer": run.data.tokenizer,
        "rules": rules.model_dump(include={"discount", "fixed_share", "top", "anchor"}),
        "experts": [_told_of(folder, run, number) for number in numbers],
    }
    shutil.copyfile(_READER, folder / READER_FILE)
    (folder / ENSEMBLE_FILE).write_text(json.dumps(told, indent=2) + "\n")


def _told_of(folder: Path, run: RunSpec, number: int) -> dict[str, Any]:
    expert, rules = run.experts[number], run.ensemble
    assert rules is not None
    origin = json.loads((folder / expert.name / MARKER).read_text())
    with (folder / expert.name / WEIGHTS_FILE).open("rb") as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()
    sizes = expert.model.model_dump(include={"hidden_size", "intermediate_size", "num_layers"})
    return {
        "name": expert.name,
        "answers": number > 0 or rules.anchor != NONE,
        "sizes": sizes
        if expert.frozen is None
        else sizes | {"parameters": expert.frozen.parameters},
        "round": origin["round"],
        "tokens": origin["tokens"],
        "sha256": {WEIGHTS_FILE: digest},
    }
