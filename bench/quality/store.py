"""Results on disk: one line of JSON per arm and seed, so a study can be stopped and gone on with.

A line is added when its run is complete; of several with one name the last counts. A run of other
sizes than asked for does not count.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from .runs import AnyArm, AnyResult, told
from .settings import Setting

ResultT = TypeVar("ResultT", bound=AnyResult)


@dataclass(frozen=True, slots=True)
class Store(Generic[ResultT]):
    """The results of one setting in the file of a study, all of one kind.

    Attributes:
        kind: class of the results. A line may lack what has a default there, in its arm or in its
            setting: it was made before there was a choice.
    """

    path: Path
    setting: Setting
    kind: Callable[..., ResultT]

    def load(self, arm: AnyArm, seed: int) -> ResultT | None:
        """The result of this run, if it was made with these sizes."""
        tree = self._last_of(self._name(arm, seed))
        if tree is None:
            return None
        result = self.kind(**tree)
        is_same = _says(result.arm, told(arm), _defaults(arm))
        is_same &= _says(result.setting, asdict(self.setting), _defaults(self.setting))
        return result if is_same else None

    def save(self, arm: AnyArm, result: ResultT) -> None:
        """Add the result in one write, after a line that was cut short if there is one."""
        tree = {"name": self._name(arm, result.seed), **_rounded(asdict(result))}
        begin = "\n" if self._text()[-1:] not in ("", "\n") else ""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            file.write(f"{begin}{json.dumps(tree)}\n".encode())

    def _name(self, arm: AnyArm, seed: int) -> str:
        return f"{self.setting.name}/{arm.name}-{seed}"

    def _text(self) -> str:
        return self.path.read_text() if self.path.exists() else ""

    def _last_of(self, name: str) -> dict[str, Any] | None:
        opening = json.dumps({"name": name})[:-1] + ","
        for line in reversed(self._text().splitlines()):
            if line.startswith(opening):
                with suppress(ValueError):  # it was cut short
                    return {key: each for key, each in json.loads(line).items() if key != "name"}
        return None


def read_back(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree as it comes out of JSON: tuples are lists there."""
    back: dict[str, Any] = json.loads(json.dumps(tree))
    return back


def _says(kept: dict[str, Any], asked_for: dict[str, Any], defaults: dict[str, Any]) -> bool:
    """Whether a line says what was asked for; what it lacks is as it is by default."""
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
