"""A run that was stopped half-way goes on where it was: a file holds what it is between two rounds.

Tensors are the file's, all else is its metadata. A run that goes on ends with the digits of one
that was never stopped. Runs whose exchange remembers earlier rounds, or that average in fragments,
are not kept: they begin anew.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


@dataclass(frozen=True, slots=True)
class Stand:
    """What a run holds when no average is on its way.

    Attributes:
        told: what is not tensors, as JSON has it.
        tensors: weights and moments, by name.
    """

    told: dict[str, Any]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Halfway:
    """The file of one run; it is there from the first save to the run's end."""

    path: Path

    def load(self) -> Stand | None:
        """What was kept, if there is anything."""
        if not self.path.exists():
            return None
        with safe_open(self.path, "pt") as kept:
            told = json.loads(kept.metadata()["told"])
            return Stand(told, {name: kept.get_tensor(name) for name in kept.keys()})  # noqa: SIM118

    def save(self, stand: Stand) -> None:
        """Keep this in place of what was kept before, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        tensors = {name: tensor.cpu().clone() for name, tensor in stand.tensors.items()}
        save_file(tensors, draft, {"told": json.dumps(stand.told)})
        draft.replace(self.path)

    def remove(self) -> None:
        """The run has ended."""
        self.path.unlink(missing_ok=True)
