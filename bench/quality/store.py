"""Results on disk: one small file per arm and seed, so a study can be stopped and gone on with.

A file is written when its run is complete; a run of other sizes than asked for does not count.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from .arms import Arm
from .run import Result
from .settings import Setting
from .streaming import StreamingResult
from .streaming_arms import StreamingArm

AnyResult = TypeVar("AnyResult", Result, StreamingResult)


@dataclass(frozen=True, slots=True)
class Store(Generic[AnyResult]):
    """The results of one setting in one folder, all of one kind."""

    folder: Path
    setting: Setting
    kind: type[AnyResult]

    def load(self, arm: Arm | StreamingArm, seed: int) -> AnyResult | None:
        """The result of this run, if it was made with these sizes."""
        path = self._path(arm, seed)
        if not path.exists():
            return None
        tree: dict[str, Any] = json.loads(path.read_text())
        result = self.kind(**tree)
        same = result.arm == asdict(arm) and result.setting == asdict(self.setting)
        return result if same else None

    def save(self, arm: Arm | StreamingArm, result: AnyResult) -> None:
        """Keep it, whole or not at all."""
        path = self._path(arm, result.seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(_rounded(asdict(result)), indent=None) + "\n")
        draft.replace(path)

    def _path(self, arm: Arm | StreamingArm, seed: int) -> Path:
        return self.folder / self.setting.name / f"{arm.name}-{seed}.json"


def _rounded(tree: Any) -> Any:
    """Seven digits: more than a loss has."""
    if isinstance(tree, float):
        return float(f"{tree:.7g}")
    if isinstance(tree, dict):
        return {key: _rounded(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_rounded(value) for value in tree]
    return tree
