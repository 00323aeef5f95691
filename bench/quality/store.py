"""Results on disk: one small file per arm and seed, so a study can be stopped and gone on with.

A file is written when its run is complete; a run of other sizes than asked for does not count.
"""

import json
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from .runs import AnyArm, AnyResult, told
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
        is_same = _says(result.arm, told(arm), _defaults(arm))
        is_same &= _says(result.setting, asdict(self.setting), _defaults(self.setting))
        return result if is_same else None

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


def _says(kept: dict[str, Any], asked_for: dict[str, Any], defaults: dict[str, Any]) -> bool:
    """Whether a file says what was asked for; what it lacks is as it is by default."""
    lacking = {name: defaults[name] for name in asked_for.keys() & (defaults.keys() - kept.keys())}
    return {**read_back(lacking), **kept} == read_back(asked_for)


def _defaults(made: Any) -> dict[str, Any]:
    """The defaults of its fields, and of those of its parts."""
    found: dict[str, Any] = {}
    for field in fields(made):
        if is_dataclass(field.default):
            found |= _defaults(field.default)
        elif field.default is not MISSING:
            found[field.name] = field.default
    return found


def _rounded(tree: Any) -> Any:
    """The tree with numbers of seven digits: more than a loss has."""
    if isinstance(tree, float):
        return float(f"{tree:.7g}")
    if isinstance(tree, dict):
        return {key: _rounded(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_rounded(value) for value in tree]
    return tree
