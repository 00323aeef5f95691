"""Results on disk: one small file per arm and seed, so a study can be stopped and gone on with.

A file is written when its run is complete; a run of other sizes than asked for does not count.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .arms import Arm
from .run import Result
from .settings import Setting


@dataclass(frozen=True, slots=True)
class Store:
    """The results of one setting in one folder."""

    folder: Path
    setting: Setting

    def load(self, arm: Arm, seed: int) -> Result | None:
        """The result of this run, if it was made with these sizes."""
        path = self._path(arm, seed)
        if not path.exists():
            return None
        tree: dict[str, Any] = json.loads(path.read_text())
        result = Result(**tree)
        same = result.arm == _read_back(arm) and result.setting == _read_back(self.setting)
        return result if same else None

    def save(self, arm: Arm, result: Result) -> None:
        """Keep it, whole or not at all."""
        path = self._path(arm, result.seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(_rounded(asdict(result)), indent=None) + "\n")
        draft.replace(path)

    def _path(self, arm: Arm, seed: int) -> Path:
        return self.folder / self.setting.name / f"{arm.name}-{seed}.json"


def _read_back(sizes: Arm | Setting) -> dict[str, Any]:
    """As they come out of a file: tuples are lists there."""
    tree: dict[str, Any] = json.loads(json.dumps(asdict(sizes)))
    return tree


def _rounded(tree: Any) -> Any:
    """Seven digits: more than a loss has."""
    if isinstance(tree, float):
        return float(f"{tree:.7g}")
    if isinstance(tree, dict):
        return {key: _rounded(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_rounded(value) for value in tree]
    return tree
