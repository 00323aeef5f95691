"""What `loco-peer plan` says first: hours, money, the way; and pipelines where they are needed."""

import json
from pathlib import Path

import pytest
from preset_files import preset_toml
from typer.testing import CliRunner

from peer.cli.app import app
from protocol.run.needs import flops_per_token
from protocol.run.run_spec import parse_toml

CARDS = "peer,location,card,price_per_hour\na,Iowa,H100,2.49\nb,Oregon,RTX 4090,0.50\n"


def plan(folder: Path, table: str, *more: str, preset: str = "125m"):
    (folder / "run.toml").write_text(preset_toml(preset))
    (folder / "peers.csv").write_text(table)
    arguments = ["plan", str(folder / "run.toml"), "--peers", str(folder / "peers.csv"), *more]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})


def test_hours_money_and_the_way_come_first_and_no_pipeline_is_planned(tmp_path, monkeypatch):
    monkeypatch.setattr("peer.cli.plan.what_if", pytest.fail)
    result = plan(tmp_path, CARDS)
    assert result.exit_code == 0, result.output
    spec = parse_toml(preset_toml("125m"))
    tokens = spec.training.total_steps * spec.tokens_per_step
    per_s = (989e12 + 165e12) * 0.35 / flops_per_token(spec)
    hours = 2 * tokens / per_s / 3600
    first, second, third, *_ = result.output.splitlines()
    assert first == (
        f"These 2 machines: {hours:.1f} hours, {hours * 2.99:.2f} dollars, as replicas that average"
        " in pairs."
    )
    assert second.startswith("3.3 billion tokens in all, at ")
    assert "a (H100), b (RTX-4090): estimated from peak FLOP/s at 35% MFU; not measured" in third
    assert "--stages N plans one" in result.output


def test_one_machine_trains_alone(tmp_path):
    result = plan(tmp_path, CARDS.rpartition("b,")[0])
    assert result.output.startswith("This machine: ")
    assert "as one that trains alone." in result.output
    told = json.loads(plan(tmp_path, CARDS.rpartition("b,")[0], "--json").output)["answer"]
    assert told["way"] == "noloco"
    assert told["cost"] == pytest.approx(told["hours"] * 2.49)


def test_small_models_are_not_promised_what_large_ones_reach(tmp_path):
    assert "keeps no card busy" in plan(tmp_path, CARDS, preset="demo").output
    assert "keeps no card busy" not in plan(tmp_path, CARDS).output


def test_memory_that_the_table_does_not_say_is_told(tmp_path):
    table = "peer,location,compute_s,price_per_hour\nmine,Iowa,0.5,0\n"
    assert "is not known of mine: no memory_gb." in plan(tmp_path, table).output


@pytest.mark.slow
def test_a_pipeline_is_planned_where_the_model_does_not_fit(tmp_path):
    table = CARDS.replace("H100", "A10G").replace("RTX 4090", "RTX 3080")
    result = plan(tmp_path, table, preset="1b")
    assert result.exit_code == 0, result.output
    assert "as a full pipeline of 2 stages." in result.output.splitlines()[0]
    assert "training state takes 13.6 GB, too much for b." in result.output
    assert "full pipeline" in result.output


@pytest.mark.slow
def test_a_pipeline_is_planned_where_one_is_asked_for(tmp_path):
    asked = plan(tmp_path, CARDS, "--stages", "2", "--microbatches", "2")
    assert "as a full pipeline of 2 stages." in asked.output.splitlines()[0]
    told = json.loads(plan(tmp_path, CARDS, "--json", "--microbatches", "2").output)
    assert {"answer", "arrangement", "tokens_per_s"} <= set(told)


def test_the_page_shows_what_the_command_says_first(tmp_path):
    page = (Path(__file__).parents[3] / "docs/planning.md").read_text(encoding="utf-8")
    told = plan(tmp_path, CARDS).output.splitlines()[:3]
    assert "".join(f"    {line}\n" for line in [*CARDS.splitlines(), ""][:-1]) in page
    assert "".join(f"    {line}\n" for line in told) in page


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (CARDS.replace("H100", "H10"), "peers.csv line 2: the table of cards has no 'H10'; did"),
        (CARDS.replace("2.49", ""), "peers.csv line 2: no price_per_hour"),
    ],
)
def test_wrong_tables_end_with_code_2(tmp_path, table, sentence):
    result = plan(tmp_path, table)
    assert result.exit_code == 2
    assert sentence in result.stderr
