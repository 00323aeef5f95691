"""Results on disk: one small file per arm and seed, so a study can be stopped and gone on with.

A file is written when its run is complete; a run of other sizes than asked for does not count.
"""

import json
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from .runs import AnyArm, AnyResult
from .settings import Setting

ResultT = TypeVar("ResultT", bound=AnyResult)


@dataclass(frozen=True, slots=True)
class Store(Generic[ResultT]):
    """The results of one setting in one folder, all of one kind.

    Attributes:
        kind: class of the results. A file may lack what has a default there, in its arm or in its
            setting: it was made before there was a choice.
    """

    folder: Path
    setting: Setting
    kind: Callable[..., ResultT]

    def load(self, arm: AnyArm, seed: int) -> ResultT | None:
        """The result of this run, if it was made with these sizes."""
        path = self._path(arm, seed)
        if not path.exists():
            return None
        result = self.kind(**json.loads(path.read_text()))
        same_arm = {**_defaults(arm), **result.arm} == read_back(asdict(arm))
        sizes = {**_defaults(self.setting), **result.setting}
        return result if same_arm and sizes == read_back(asdict(self.setting)) else None

    def save(self, arm: AnyArm, result: ResultT) -> None:
        """Keep the result, whole or not at all."""
        path = self._path(arm, result.seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(_rounded(asdict(result)), indent=None) + "\n")
        draft.replace(path)

    def _path(self, arm: AnyArm, seed: int) -> Path:
        return self.folder / self.setting.name / f"{arm.name}-{seed}.json"


def read_back(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree as it comes out of a file: tuples are lists there."""
    back: dict[str, Any] = json.loads(json.dumps(tree))
    return back


def _defaults(made: AnyArm | Setting) -> dict[str, Any]:
    return {field.name: field.default for field in fields(made) if field.default is not MISSING}


def _rounded(tree: Any) -> Any:
    """The tree with numbers of seven digits: more than a loss has."""
    if isinstance(tree, float):
        return float(f"{tree:.7g}")
    if isinstance(tree, dict):
        return {key: _rounded(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_rounded(value) for value in tree]
    return tree
