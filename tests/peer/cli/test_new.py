"""`loco-peer new`: files that explain themselves, and are valid as they are."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from peer.cli.explanations import EXAMPLES, EXPLANATIONS, SECTIONS
from peer.cli.new import (
    METHODS,
    OPTIMIZERS,
    PRESETS,
    SET_BY_START,
    preset_spec,
    preset_toml,
    write_new,
)
from peer.options.config import ConfigError
from protocol.errors import InvalidRunSpec
from protocol.run.run_spec import parse_toml
from protocol.run.ways import WAYS, others_keys


def keys(model: BaseModel, prefix: str = "") -> set[str]:
    """Every key, and the name of every section."""
    found = set()
    for name, value in model:
        inner = keys(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else set()
        found |= {prefix + name} | inner
    return found


def keys_of(tree: dict[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for name, value in tree.items():
        inner = keys_of(value, f"{prefix}{name}.") if isinstance(value, dict) else set()
        found |= {prefix + name} | inner
    return found


ALL_KEYS = set().union(
    *(
        keys(preset_spec("demo", method, optimizer))
        for method in METHODS
        for optimizer in OPTIMIZERS
    )
)


def test_every_key_is_explained_and_no_other() -> None:
    assert set(EXPLANATIONS) | set(SECTIONS) | SET_BY_START == ALL_KEYS


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_whole(preset: str, method: str, optimizer: str) -> None:
    text = preset_toml(preset, method, optimizer)
    assert parse_toml(text) == preset_spec(preset, method, optimizer)
    idle = {f"sync.{key}" for key in others_keys(method)}
    for other, row in WAYS.items():
        if row.section and other != method:
            idle |= {key for key in ALL_KEYS if key.startswith(f"sync.{row.section}")}
    if optimizer != "muon":
        idle |= {key for key in ALL_KEYS if key.startswith("optimizer.muon")}
    written = keys_of(tomllib.loads(text))
    assert written | (set(EXAMPLES) - idle) | SET_BY_START == ALL_KEYS - idle
    assert max(map(len, text.splitlines())) <= 110


def test_an_unknown_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="unknown method 'fedavg': use noloco or diloco or gasloc"
    ):
        write_new(tmp_path / "run.toml", "demo", "fedavg", force=False)


def test_peers_choose_how_often_they_average_unless_they_hold_stages() -> None:
    assert preset_spec("demo").sync.inner_steps == "auto"
    assert preset_spec("demo", "diloco").sync.inner_steps == 25
    staged = preset_spec("demo", stages=2)
    assert (staged.sync.inner_steps, staged.pipeline.stages) == (25, 2)


def test_muon_trains_at_four_times_the_rate_of_adamw() -> None:
    inner = preset_spec("125m").optimizer
    assert (inner.name, inner.learning_rate) == ("muon", 6e-4)
    assert inner.muon is not None
    assert inner.muon.learning_rate == pytest.approx(2.4e-3)
    assert preset_spec("125m", optimizer="adamw").optimizer.muon is None


@pytest.mark.parametrize("method", ["diloco", "streaming"])
def test_stages_that_do_not_average_by_the_method_are_refused(tmp_path: Path, method) -> None:
    with pytest.raises(InvalidRunSpec, match="stages average by noloco or gasloc"):
        write_new(tmp_path / "run.toml", "demo", method, stages=2, force=False)
    assert not (tmp_path / "run.toml").exists()


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--stages 5: 'demo' has 4 layers, one for a stage"):
        write_new(tmp_path / "run.toml", "demo", stages=5, force=False)
    assert not (tmp_path / "run.toml").exists()


def test_an_unknown_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown optimizer 'sgd': use muon or adamw"):
        write_new(tmp_path / "run.toml", "demo", "noloco", "sgd", force=False)
    assert not (tmp_path / "run.toml").exists()


@pytest.mark.parametrize("key", EXAMPLES)
def test_examples_work_when_they_are_taken_out_of_their_comment(key: str) -> None:
    line = f"{key.rpartition('.')[2]} = {EXAMPLES[key]}"
    text = preset_toml("demo", stages=4)
    assert f"\n# {line}\n" in text
    assert parse_toml(text.replace(f"# {line}", line)) != parse_toml(text)


def test_presets_have_the_size_they_are_named_for() -> None:
    for preset, expected in (("125m", 125e6), ("1b", 1.0e9)):
        model = parse_toml(preset_toml(preset)).model
        head = model.hidden_size // model.num_heads
        attention = model.hidden_size * (
            2 * model.hidden_size + 2 * head * (model.num_kv_heads or model.num_heads)
        )
        layer = attention + 3 * model.hidden_size * model.intermediate_size
        total = model.num_layers * layer + 50_257 * model.hidden_size
        assert total == pytest.approx(expected, rel=0.1), preset


def test_a_file_is_not_lost_by_accident(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    write_new(path, "demo", force=False)
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists already; use --force"):
        write_new(path, "demo", force=False)
    assert path.read_text() == "mine"
    write_new(path, "125m", force=True)
    assert parse_toml(path.read_text()).name == "llama-125m"


def test_unknown_presets_are_told_the_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown preset '125M': use demo, 125m, 1b"):
        write_new(tmp_path / "run.toml", "125M", force=False)
    assert not (tmp_path / "run.toml").exists()
