"""The runs of any study: what it asks of an arm and of a result, and differences of equal seeds."""

from collections.abc import Mapping
from dataclasses import Field, asdict, fields, is_dataclass
from typing import Any, ClassVar, Protocol


class AnyArm(Protocol):
    """One way to train together; two arms of a study differ in name."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def name(self) -> str:
        """The name of the arm in its study."""


class AnyResult(Protocol):
    """The result of one run.

    Attributes:
        arm, setting: their fields; the run is told by these and its seed.
        seconds: it took.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    arm: dict[str, Any]
    setting: dict[str, Any]
    seed: int
    seconds: float

    @property
    def loss(self) -> float:
        """The loss by which arms are compared, nats per token of the held-out text."""


def told(arm: AnyArm) -> dict[str, Any]:
    """An arm as its results tell it: its fields, and beside them those of its parts.

    A part that is as it is by default is left out: it says nothing.
    """
    tree = asdict(arm)
    for field in fields(arm):
        part = getattr(arm, field.name)
        if is_dataclass(part):
            inner = tree.pop(field.name)
            tree |= {} if part == field.default else inner
    return tree


AnyRuns = Mapping[str, Mapping[int, AnyResult]]
"""Arm to seed to result."""


def paired(name: str, runs: AnyRuns, reference: str) -> list[float]:
    """Loss of an arm less that of the reference, for each seed that both have."""
    ours, theirs = runs.get(name, {}), runs.get(reference, {})
    return [ours[seed].loss - theirs[seed].loss for seed in sorted(set(ours) & set(theirs))]
