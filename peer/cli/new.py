"""`loco-peer new`: a run spec with every key explained.

The file is made from the run spec's own fields, so that a key cannot be forgotten: the values from
a preset, the words from `EXPLANATIONS`. A key that has no value yet is written as a comment.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from peer.options.config import ConfigError
from peer.options.run_options import check_stages
from protocol.run.optimizer_section import OptimizerSection
from protocol.run.run_spec import RunSpec, SyncSection
from protocol.run.ways import WAYS, others_keys

from .explanations import EXAMPLES, EXPLANATIONS, SECTIONS

SET_BY_START: Final = frozenset(
    {"data.manifest", "data.tokenizer_digest", "admission.secret_digest", "frozen"}
)
"""Keys that people do not write: the founder's `start` does."""

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "demo": {
        "name": "demo",
        "optimizer": {"learning_rate": 2e-3},
        "training": {"total_steps": 1200, "batch_size": 8},
        "sync": {"inner_steps": 25},
    },
    "125m": {
        "name": "llama-125m",
        "model": {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_layers": 12,
            "num_heads": 12,
            "context_length": 1024,
        },
        "data": {"source": "text:data/*.txt", "tokenizer": "openai-community/gpt2"},
        "optimizer": {"learning_rate": 6e-4, "warmup_steps": 1000},
        "training": {"total_steps": 25_000, "batch_size": 64},
        "sync": {"inner_steps": 50},
    },
    "1b": {
        "name": "llama-1b",
        "model": {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_layers": 22,
            "num_heads": 32,
            "num_kv_heads": 8,
            "context_length": 2048,
        },
        "data": {"source": "text:data/*.txt", "tokenizer": "openai-community/gpt2"},
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 1000},
        "training": {"total_steps": 25_000, "batch_size": 64},
        "sync": {"inner_steps": 100, "validate_every": 5},
    },
}
"""Presets by name: the keys whose values differ from the run spec's defaults."""
UNTRIED: Final = frozenset({"125m", "1b"})
"""Presets whose sizes and rates are those of the literature: none of them has been run."""

UNTRIED_LINE: Final = (
    "# Nobody has run this preset, nor loco-peer on a GPU: its rates are those of the literature."
)
METHODS: Final = tuple(WAYS)
OPTIMIZERS: Final = ("muon", "adamw")
MUON_RATE: Final = 4.0
"""Muon's rate for the matrices of the blocks, in AdamW's for the rest (decision 0039)."""


def write_new(
    path: Path,
    preset: str,
    method: str = METHODS[0],
    optimizer: str = OPTIMIZERS[0],
    stages: int = 1,
    *,
    force: bool,
) -> None:
    """Write the run spec of `preset` to `path`.

    Raises:
        ConfigError: no such preset, method or optimizer, more stages than layers, or the file is
        there already, or cannot be written.
        InvalidRunSpec: stages do not average by this method.
    """
    for kind, name, known in (("method", method, METHODS), ("optimizer", optimizer, OPTIMIZERS)):
        if name not in known:
            raise ConfigError(f"unknown {kind} '{name}': use {' or '.join(known)}")
    if preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"unknown preset '{preset}': use {', '.join(PRESETS)}{hint}")
    if stages > (layers := RunSpec.model_validate(PRESETS[preset]).model.num_layers):
        raise ConfigError(f"--stages {stages}: '{preset}' has {layers} layers, one for a stage")
    check_stages(preset_spec(preset, method, optimizer, stages))
    text = preset_toml(preset, method, optimizer, stages)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists already; use --force to replace it") from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def preset_spec(
    preset: str, method: str = METHODS[0], optimizer: str = OPTIMIZERS[0], stages: int = 1
) -> RunSpec:
    """The run spec of a preset.

    Peers choose how often they average by themselves, where the way of averaging lets them; holders
    of stages do not.
    """
    tree = PRESETS[preset]
    inner = {**tree["optimizer"], "name": optimizer}
    if optimizer == "muon":
        inner["muon"] = {"learning_rate": MUON_RATE * inner["learning_rate"]}
    sync = {**tree["sync"], "method": method}
    if WAYS[method].has_own_rounds and stages == 1:
        sync["inner_steps"] = "auto"
    pipeline = {"stages": stages}
    return RunSpec.model_validate({**tree, "sync": sync, "optimizer": inner, "pipeline": pipeline})


def preset_toml(
    preset: str, method: str = METHODS[0], optimizer: str = OPTIMIZERS[0], stages: int = 1
) -> str:
    """The commented TOML of a preset."""
    spec = preset_spec(preset, method, optimizer, stages)
    untried = [UNTRIED_LINE] * (preset in UNTRIED)
    return "\n".join([*_head(spec), *untried, "", *_keys(spec, ""), *_sections(spec)]) + "\n"


def _head(spec: RunSpec) -> list[str]:
    return [
        "# A run of loco-peer: what all its peers agree on. What is left out has its default.",
        f"# {spec.total_rounds:,} rounds of {spec.sync.round_steps} inner steps.",
        f"# {spec.tokens_per_step:,} tokens per step and peer.",
    ]


def _sections(section: BaseModel, prefix: str = "") -> Iterator[str]:
    for name, value in section:
        if isinstance(value, BaseModel):
            path = prefix + name
            yield from ["", f"# {SECTIONS[path]}", f"[{path}]"]
            yield from _keys(value, f"{path}.")
            yield from _sections(value, f"{path}.")


def _keys(section: BaseModel, prefix: str) -> Iterator[str]:
    for name, value in section:
        path = prefix + name
        if isinstance(value, BaseModel) or path in SET_BY_START or _is_idle(section, name):
            continue
        yield f"# {EXPLANATIONS[path]}"
        yield f"{name} = {_literal(value)}" if value is not None else f"# {name} = {EXAMPLES[path]}"


def _is_idle(section: BaseModel, name: str) -> bool:
    """Whether the chosen method or optimizer does not use a key."""
    if isinstance(section, OptimizerSection):
        return name == "muon"  # where it is chosen, it is a section, not a key
    if not isinstance(section, SyncSection):
        return False
    own = WAYS[section.method].section
    others_sections = {row.section for row in WAYS.values()} - {own}
    return name in others_keys(section.method) or name in others_sections


def _literal(value: Any) -> str:
    return json.dumps(value)  # JSON of such plain values is TOML
