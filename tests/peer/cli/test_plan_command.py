"""`loco-peer plan`: what it prints for the example of the documentation, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peer.cli.app import app
from peer.cli.new import preset_toml

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "docs/examples"
PAGE = ROOT / "docs/planning.md"


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(preset_toml("1b", "noloco"))
    return path


def planned(run_toml: Path, *more: str, peers: Path = EXAMPLES / "peers.csv"):
    links = ["--links", str(EXAMPLES / "links.csv")]
    return CliRunner().invoke(app, ["plan", str(run_toml), "--peers", str(peers), *links, *more])


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(run_toml, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = planned(run_toml)
    assert result.exit_code == 0, result.output
    block = "".join(f"    {line}\n" for line in result.output.rstrip().splitlines())
    assert block in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_json_has_the_plan_and_its_name(run_toml):
    result = planned(run_toml, "--json", "--codec", "int8", "--stages", "2", "--visited", "2")
    told = json.loads(result.output)
    assert len(told["plan"]) == 32
    assert set(told["arrangement"].values()) == {0, 1}
    assert told["fits"]["noloco"] is False
    assert told["iteration_s"]["full"] == told["iteration_s"]["skippipe"]


def test_a_wrong_line_ends_with_code_2_and_is_named(run_toml, tmp_path):
    peers = tmp_path / "mine.csv"
    peers.write_text("peer,location,compute_s,slots,price_per_hour\na,LA,quick,1,1\n")
    result = planned(run_toml, peers=peers)
    assert result.exit_code == 2
    assert result.stderr == "loco-peer: mine.csv line 2: compute_s is 'quick', not a number\n"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--codec", "zip"], "unknown codec 'zip': use fp32, bf16, int8, int4"),
        (["--stages", "9"], "8 machines cannot hold 9 stages"),
    ],
)
def test_wrong_options_end_with_code_2(run_toml, more, sentence):
    result = planned(run_toml, *more)
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_a_missing_file_is_named(run_toml, tmp_path):
    result = planned(run_toml, peers=tmp_path / "nowhere.csv")
    assert result.exit_code == 2
    assert "cannot read" in result.stderr
    assert planned(tmp_path / "no.toml").exit_code == 2
