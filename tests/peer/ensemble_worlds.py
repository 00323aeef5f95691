"""Exports of experts with tiny models, written as `loco-peer export` writes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from peer.state.export import export_hugging_face
from peer.state.export_folder import write_ensemble
from peer.training.model import FlatModel, initial_module
from protocol.run.run_spec import RunSpec

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}
NAMES = ("general", "code", "math")
LOUD = 8.0
"""Fresh weights say next to nothing about the next token; larger ones do."""


def run_with(
    names: Sequence[str] = NAMES,
    models: Mapping[str, Mapping[str, Any]] | None = None,
    **ensemble: Any,
) -> RunSpec:
    """A run with these experts; `models` says what differs of the sizes."""
    experts: list[dict[str, Any]] = [{"name": name} for name in names]
    for each in experts[1:]:
        each["source"] = f"text:{each['name']}/*.txt"
    for each in experts:
        if own := (models or {}).get(each["name"]):
            each["model"] = dict(own)
    tree = {
        "model": {**SIZES, "num_kv_heads": 2, "context_length": 32},
        "ensemble": {"branch_round": 0, **ensemble},
        "experts": experts,
    }
    return RunSpec.model_validate(tree)


def flat_model(spec: RunSpec, seed: int) -> FlatModel:
    module = initial_module(spec.model_copy(update={"seed": seed}), 256)
    model = FlatModel(module, torch.device("cpu"))
    model.theta_P *= LOUD
    return model


def export_of(
    folder: Path, run: RunSpec, seeds: Sequence[int] | None = None, numbers: Sequence[int] = ()
) -> Path:
    """A whole export; `seeds` are those of the experts' weights."""
    for number, expert in enumerate(run.experts):
        spec = run.of_expert(number)
        model = flat_model(spec, seeds[number] if seeds else number)
        vector = model.theta_P.detach().numpy()
        export_hugging_face(vector, spec, model.layout, folder / expert.name, round=3, tokens=99)
    write_ensemble(folder, run, numbers or range(len(run.experts)))
    return folder
