"""`loco-peer new`: files that explain themselves, and are valid as they are."""

import os
import tomllib
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
from preset_files import preset_toml
from pydantic import BaseModel
from typer.testing import CliRunner

from peer.cli import new as new_file
from peer.cli.app import app
from peer.cli.new import (
    EXAMPLES,
    EXPLANATIONS,
    IN_FRAGMENTS,
    METHODS,
    OF_CHECKPOINT,
    OPTIMIZERS,
    PRESETS,
    SECTIONS,
    SET_BY_START,
    TUNING,
    preset_spec,
    toml_of,
    write_new,
)
from peer.options.config import ConfigError
from peer.options.needs_told import corpus_tokens_of, told_needs
from protocol.errors import InvalidRunSpec
from protocol.run.run_spec import KEYS_OF_WHOLE_MODELS, OF_MIXTURES, ExpertSection, parse_toml
from protocol.run.ways import WAYS, others_keys


def written(path: Path, preset: str, *given: Any, force: bool, **more: Any) -> list[str]:
    """As the command does."""
    return write_new(path, preset_spec(preset, *given, **more), preset, force=force)


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


NAMES = ("code", "math", "web")
WITH_EXPERTS = preset_spec("demo", experts=NAMES)
ALL_KEYS = {f"experts.{key}" for key in ExpertSection.model_fields}.union(
    keys(WITH_EXPERTS),
    (f"model.{key}" for key in OF_MIXTURES),
    keys(preset_spec("lora", model="some/model")),
    *(
        keys(preset_spec("demo", method, optimizer))
        for method in METHODS
        for optimizer in OPTIMIZERS
    ),
)


def test_every_key_is_explained_and_no_other() -> None:
    assert set(EXPLANATIONS) | set(SECTIONS) | SET_BY_START == ALL_KEYS


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_whole(preset: str, method: str, optimizer: str) -> None:
    text = preset_toml(preset, method, optimizer)
    assert parse_toml(text) == preset_spec(preset, method, optimizer)
    in_pairs = method == IN_FRAGMENTS
    method = "noloco" if in_pairs else method
    idle = {f"sync.{key}" for key in others_keys(method)}
    if in_pairs:
        idle |= {f"sync.{key}" for key in KEYS_OF_WHOLE_MODELS}
    elif method == "noloco":
        idle |= {"sync.noloco.blocks_per_fragment"}
    for other, row in WAYS.items():
        if other != method:
            idle |= {key for key in ALL_KEYS if key.startswith(f"sync.{row.section}")}
    if optimizer != "muon":
        idle |= {key for key in ALL_KEYS if key.startswith("optimizer.muon")}
    idle |= {
        key for key in ALL_KEYS if key.startswith(("pipeline", "experts", "ensemble", "adapter"))
    }
    idle |= {"data.chat_template", "data.replay", "data.replay_share"}
    idle |= {f"model.{key}" for key in OF_MIXTURES}
    written = keys_of(tomllib.loads(text))
    assert written | ((set(EXAMPLES) | SET_BY_START) - idle) == ALL_KEYS - idle
    assert max(map(len, text.splitlines())) <= 110


def test_an_unknown_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="unknown method 'fedavg': use noloco or diloco or streaming"
    ):
        written(tmp_path / "run.toml", "demo", "fedavg", force=False)


def test_peers_choose_how_often_they_average_unless_they_hold_stages() -> None:
    assert preset_spec("demo").sync.inner_steps == "auto"
    assert preset_spec("demo", "diloco").sync.inner_steps == 25
    staged = preset_spec("demo", stages=2)
    assert (staged.sync.inner_steps, staged.pipeline.stages) == (25, 2)


def test_models_are_compiled_where_it_pays_and_can_be() -> None:
    found = {preset: preset_spec(preset).training.compile for preset in PRESETS}
    assert found == {"demo": False, "125m": "auto", "1b": "auto"}
    assert preset_spec("125m", stages=2).training.compile is False


def test_muon_trains_at_four_times_the_rate_of_adamw() -> None:
    inner = preset_spec("125m").optimizer
    assert (inner.name, inner.learning_rate) == ("muon", 6e-4)
    assert inner.muon is not None
    assert inner.muon.learning_rate == pytest.approx(2.4e-3)
    assert preset_spec("125m", optimizer="adamw").optimizer.muon is None


@pytest.mark.parametrize("method", ["diloco", "streaming"])
def test_stages_that_do_not_average_by_the_method_are_refused(tmp_path: Path, method) -> None:
    with pytest.raises(InvalidRunSpec, match="stages average by noloco so far"):
        written(tmp_path / "run.toml", "demo", method, stages=2, force=False)
    assert not (tmp_path / "run.toml").exists()


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--stages 5: 'demo' has 4 layers, one for a stage"):
        written(tmp_path / "run.toml", "demo", stages=5, force=False)
    assert not (tmp_path / "run.toml").exists()


def test_an_unknown_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown optimizer 'sgd': use muon or adamw"):
        written(tmp_path / "run.toml", "demo", "noloco", "sgd", force=False)
    assert not (tmp_path / "run.toml").exists()


@pytest.mark.parametrize("key", EXAMPLES)
def test_examples_work_when_they_are_taken_out_of_their_comment(key: str) -> None:
    line = f"{key} = {EXAMPLES[key]}"
    text = toml_of(WITH_EXPERTS, "demo") if "ensemble" in key else preset_toml("demo")
    if key == "data.chat_template":
        text = toml_of(preset_spec("sft", model="some/model"), "sft")
    assert f"\n# {line}\n" in text
    assert parse_toml(text.replace(f"# {line}", line)) != parse_toml(text)


@pytest.mark.parametrize("preset", TUNING)
@pytest.mark.parametrize("optimizer", [None, "muon"])
def test_presets_to_fine_tune_leave_to_the_checkpoint_what_it_says(preset, optimizer) -> None:
    spec = preset_spec(preset, optimizer=optimizer, model="some/model")
    text = toml_of(spec, preset)
    assert parse_toml(text) == spec
    tree = tomllib.loads(text)
    assert not keys_of(tree) & OF_CHECKPOINT
    assert tree["model"]["init_from"] == "some/model"
    assert spec.optimizer.name == (optimizer or "adamw")
    assert spec.optimizer.warmup_steps == spec.training.total_steps / 100
    assert (spec.adapter is not None) == (preset == "lora")
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--preset", "lora"], "--preset lora needs --model, the checkpoint"),
        (["--preset", "sft"], "--preset sft needs --model, the checkpoint"),
        (["--model", "some/model"], "--model is for --preset sft or lora"),
        (["--preset", "sft", "--model", "some/model", "--stages", "2"], "no --stages"),
    ],
)
def test_a_preset_to_fine_tune_wants_a_checkpoint(tmp_path: Path, options, said) -> None:
    result = CliRunner().invoke(app, ["new", str(tmp_path / "run.toml"), *options])
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "run.toml").exists()


CHANGED_BY_PEOPLE = {
    "name",
    "data.source",
    "data.tokenizer",
    "model.hidden_size",
    "model.num_layers",
    "training.total_steps",
    "training.batch_size",
    "optimizer.learning_rate",
    "sync.method",
    "sync.inner_steps",
    "admission.mode",
}


@pytest.mark.parametrize(
    ("method", "stages"), [*((method, 1) for method in METHODS), ("noloco", 2)]
)
def test_what_people_change_stands_on_the_first_screen(method: str, stages: int) -> None:
    text = preset_toml("125m", method, stages=stages)
    first, line, rest = text.partition("\n# ----")
    assert line
    assert len(first.splitlines()) <= 40
    there = keys_of(tomllib.loads(first))
    assert there >= CHANGED_BY_PEOPLE
    assert there >= ({"pipeline.stages"} if stages > 1 else set())
    assert not (keys_of(tomllib.loads("#" + rest)) & there) - set(SECTIONS)


def test_every_key_has_its_sentence_beside_or_above_it() -> None:
    lines = preset_toml("demo", stages=2).splitlines()
    for number, line in enumerate(lines):
        path = line.removeprefix("# ").partition(" = ")[0]
        if " = " in line and path in EXPLANATIONS:
            said = line if line.endswith(EXPLANATIONS[path]) else lines[number - 1]
            assert said.endswith(EXPLANATIONS[path]), line


def test_the_head_says_what_the_run_takes() -> None:
    head = preset_toml("125m").partition("\nname = ")[0]
    for line in told_needs(preset_spec("125m"), corpus_tokens_of(preset_spec("125m"))):
        assert f"#   {line}\n" in head + "\n"
    for word in ("123.6M parameters", "memory", "disk", "tokens", "an hour"):
        assert word in head


def test_what_the_run_takes_is_said_when_the_file_is_written(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["new", str(tmp_path / "run.toml"), "--preset", "125m"])
    told = told_needs(preset_spec("125m"), corpus_tokens_of(preset_spec("125m")))
    *lines, last = result.output.splitlines()
    assert lines == [f"  {line}" for line in told]
    assert last.startswith("wrote ")


def test_all_stages_are_visited_and_what_skipping_gains_and_costs_is_said() -> None:
    text = preset_toml("demo", stages=4)
    pipeline = parse_toml(text).pipeline
    assert (pipeline.stages, pipeline.visited, pipeline.num_visited) == (4, 4, 4)
    said = text[: text.index("pipeline.visited = 4")].rpartition("[pipeline]")[2]
    assert "27 s for 56" in said
    assert "0.12 nats behind" in said
    assert parse_toml("[pipeline]\nstages = 4\n").pipeline.num_visited == 3, "as it always was"
    assert "\npipeline." not in preset_toml("demo"), "noise, where there are no stages"


# --- experts --------------------------------------------------------------------------------------
def test_a_run_with_experts_is_explained(tmp_path: Path):
    path = tmp_path / "run.toml"
    result = CliRunner().invoke(app, ["new", str(path), "--experts", ",".join(NAMES)])
    assert result.exit_code == 0, result.output
    text = path.read_text()
    assert parse_toml(text) == WITH_EXPERTS
    assert max(map(len, text.splitlines())) <= 110
    for key in ("experts.source", "experts.begin", "experts.model", "experts.training"):
        assert text.count(EXPLANATIONS[key]) == len(NAMES)


def test_experts_begin_with_the_generalist_and_have_as_much_together() -> None:
    first, *others = WITH_EXPERTS.experts
    assert [first.name, *(expert.name for expert in others)] == ["general", *NAMES]
    assert [expert.begin for expert in others] == ["seed"] * 3
    steps = WITH_EXPERTS.training.total_steps
    assert first.training.total_steps == steps
    assert sum(expert.training.total_steps for expert in others) == steps // 2
    assert WITH_EXPERTS.data.source == "text:data/*/*.txt"


def test_what_is_offered_in_comments_of_an_expert_works() -> None:
    text = toml_of(WITH_EXPERTS, "demo")
    assert parse_toml(text.replace("# begin", "begin")) == WITH_EXPERTS
    larger = parse_toml(text.replace("# model.num_layers = 4 ", "model.num_layers = 6 ", 1))
    assert (larger.experts[1].model.num_layers, larger.experts[1].begin) == (6, "fresh")


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ("code,code", "two have one name"),
        ("general", "two have one name"),
        ("code,", "experts..name"),
        ("co de", "experts.co de.name"),
        ("none", "is a word of the run spec"),
    ],
)
def test_names_that_cannot_be_are_refused(tmp_path: Path, names: str, sentence: str) -> None:
    path = tmp_path / "run.toml"
    result = CliRunner().invoke(app, ["new", str(path), "--experts", names])
    assert result.exit_code == 2
    assert sentence in result.output
    assert not path.exists()


@pytest.mark.parametrize("command", ["plan", "measure"])
def test_what_takes_one_model_refuses_such_a_run_in_one_sentence(
    tmp_path: Path, command: str
) -> None:
    path, peers = tmp_path / "run.toml", tmp_path / "peers.csv"
    written(path, "demo", experts=NAMES, force=False)
    more = {"plan": ["--peers", str(peers)]}
    result = CliRunner().invoke(app, [command, str(path), *more.get(command, [])])
    assert result.exit_code == 2
    said = result.output.splitlines()[-1]
    assert "the run has [[experts]] (general, code, math, web), and" in said
    assert f"`loco-peer {command}` takes a run of one model" in said


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
    written(path, "demo", force=False)
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists already; use --force"):
        written(path, "demo", force=False)
    assert path.read_text() == "mine"
    written(path, "125m", force=True)
    assert parse_toml(path.read_text()).name == "llama-125m"


def test_of_two_that_write_at_once_one_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.toml"

    def meanwhile(*_: Any, **__: Any) -> None:
        path.write_text("the other's")

    monkeypatch.setattr(new_file, "check_new", meanwhile)
    with pytest.raises(ConfigError, match="cannot write .*run.toml: File exists"):
        written(path, "demo", force=False)
    assert path.read_text() == "the other's"


@pytest.mark.parametrize("before", [None, "mine"])
def test_on_a_full_disk_no_file_is_half_written_or_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    path = tmp_path / "run.toml"
    if before is not None:
        path.write_text(before)

    def full(_: int) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="cannot write .*run.toml: No space left"):
        written(path, "demo", force=before is not None)
    left = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert left == ({} if before is None else {"run.toml": before})


def test_a_link_stays_and_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("run.toml")
    (tmp_path / "run.toml").write_text("mine")
    written(tmp_path / "link", "demo", force=True)
    assert (tmp_path / "link").is_symlink()
    assert parse_toml((tmp_path / "run.toml").read_text()).name == "demo"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is no file"):
        written(tmp_path / "pipe", "demo", force=True)
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_to_no_file_yet_gets_one_and_a_circle_of_links_is_no_bug(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("run.toml")
    written(tmp_path / "link", "demo", force=False)
    assert (tmp_path / "link").is_symlink()
    assert parse_toml((tmp_path / "run.toml").read_text()).name == "demo"
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(ConfigError, match="cannot write .*circle: File exists"):
        written(tmp_path / "circle", "demo", force=False)
    written(tmp_path / "circle", "demo", force=True)
    assert parse_toml((tmp_path / "circle").read_text()).name == "demo"


def test_unknown_presets_are_told_the_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown preset '125M': use demo or 125m or 1b"):
        written(tmp_path / "run.toml", "125M", force=False)
    assert not (tmp_path / "run.toml").exists()
