"""`loco-peer new`: files that explain themselves, and are valid as they are."""

import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from peer.cli.explanations import EXAMPLES, EXPLANATIONS, SECTIONS
from peer.cli.new import PRESETS, SET_BY_START, preset_toml, write_new
from peer.config import ConfigError
from protocol.run_spec import RunSpec, parse_toml


def keys() -> set[str]:
    found = set()
    for name, field in RunSpec.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= {f"{name}.{inner}" for inner in field.annotation.model_fields}
        else:
            found.add(name)
    return found


def test_every_key_is_explained_and_no_other() -> None:
    assert set(EXPLANATIONS) | SET_BY_START == keys()
    assert set(SECTIONS) == {key.split(".")[0] for key in keys() if "." in key}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_whole(preset: str) -> None:
    text = preset_toml(preset)
    assert parse_toml(text) == RunSpec.model_validate(PRESETS[preset])
    written = {
        f"{section}.{key}" if isinstance(value, dict) else section
        for section, value in tomllib.loads(text).items()
        for key in (value if isinstance(value, dict) else [""])
    }
    assert written | set(EXAMPLES) | SET_BY_START == keys()
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("key", EXAMPLES)
def test_examples_work_when_they_are_taken_out_of_their_comment(key: str) -> None:
    line = f"{key.split('.')[1]} = {EXAMPLES[key]}"
    text = preset_toml("demo")
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
