"""`loco-peer plan`: what it prints for the example of the documentation, and what it refuses."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from preset_files import preset_toml
from typer.testing import CliRunner

from peer.cli.app import app
from peer.cli.options import PlanOptions, read_spec
from peer.cli.plan import question_of
from protocol.pipeline.problem import PathRules
from protocol.pipeline.question import rules_of
from protocol.run.sections import PipelineSection

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


@pytest.mark.long
@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(run_toml, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = planned(run_toml)
    assert result.exit_code == 0, result.output
    block = "".join(f"    {line}\n" for line in result.output.rstrip().splitlines())
    assert block in PAGE.read_text(encoding="utf-8")


def few_machines(folder: Path, number: int = 4) -> Path:
    """Machines that are planned for in no time."""
    path = folder / "few.csv"
    lines = [f"m{i},LA,0.{i + 2},2,0.5" for i in range(number)]
    path.write_text("\n".join(["peer,location,compute_s,slots,price_per_hour", *lines]))
    return path


def alone(run_toml: Path, peers: Path, *more: str):
    """The command without links."""
    return CliRunner().invoke(app, ["plan", str(run_toml), "--peers", str(peers), *more])


@pytest.mark.slow
def test_json_carries_the_plan_and_the_figures(run_toml, tmp_path):
    options = ["--json", "--stages", "3", "--visited", "2", "--full-every", "4"]
    result = alone(run_toml, few_machines(tmp_path), *options)
    told = json.loads(result.output)
    assert set(told["arrangement"]) == {"m0", "m1", "m2", "m3"}
    assert set(told["arrangement"].values()) == {0, 1, 2}
    data_peers = {peer for peer, stage in told["arrangement"].items() if stage == 0}
    assert set(told["paths"]) == data_peers
    for paths in told["paths"].values():
        assert all(told["arrangement"][relay] > 0 for path in paths for relay in path)
        assert {len(path) for path in paths} <= {1}
    for figure in ("iteration_s", "tokens_per_s", "cost_per_billion_tokens"):
        assert set(told[figure]) == {"noloco", "diloco", "full", "skippipe"}
    assert 0 < told["lower_bound_s"] <= told["iteration_s"]["skippipe"]
    assert len(told["plan"]) == 32
    assert told["fits"]["noloco"] is None
    assert told["unskipped"]["every"] == 4


def test_what_stands_in_the_run_spec_counts_and_options_override_it(run_toml, tmp_path):
    text = preset_toml("1b", stages=3)
    run_toml.write_text(
        text.replace("pipeline.full_every = 0\n", "pipeline.full_every = 2\n")
        .replace('pipeline.codec = "bf16"\n', 'pipeline.codec = "int8"\n')
        .replace("pipeline.max_jump = 4\n", "pipeline.max_jump = 2\n")
    )
    few = few_machines(tmp_path, 3)
    asked = question_of(read_spec(run_toml), few, None, PlanOptions())
    assert (asked.stages, asked.visited, asked.full_every) == (3, 3, 2)
    assert (asked.microbatches, asked.codec, asked.rules.max_jump) == (None, "int8", 2)
    given = PlanOptions(2, None, 0, 7, 2, "bf16")
    asked = question_of(read_spec(run_toml), few, None, given)
    assert (asked.stages, asked.visited, asked.full_every) == (2, 2, 0)
    assert (asked.microbatches, asked.codec, asked.workload.sequences) == (7, "bf16", 2)
    assert question_of(read_spec(run_toml), few, None, PlanOptions(visited=2)).visited == 2


def test_without_a_pipeline_four_stages_are_planned_for(run_toml, tmp_path):
    asked = question_of(read_spec(run_toml), few_machines(tmp_path, 6), None, PlanOptions())
    assert (asked.stages, asked.visited, asked.full_every, asked.codec) == (4, 3, 0, "bf16")
    asked = question_of(read_spec(run_toml), few_machines(tmp_path, 3), None, PlanOptions())
    assert (asked.stages, asked.visited) == (3, 2)
    assert asked.rules == PathRules()


def test_limits_of_paths_come_from_the_run_spec(run_toml):
    assert rules_of(PipelineSection(stages=4)).max_jump == 4
    assert rules_of(PipelineSection(stages=4, max_jump=2)).max_jump == 2


@pytest.mark.slow
def test_machines_too_small_for_a_stage_are_told(run_toml, tmp_path):
    few = few_machines(tmp_path, 3)
    lines = few.read_text().splitlines()
    sizes = ["memory_gb", "24", "24", "4"]
    few.write_text("\n".join(f"{a},{b}" for a, b in zip(lines, sizes, strict=True)))
    said = alone(run_toml, few, "--stages", "3", "--microbatches", "2").output
    assert "Too small for a stage (6.0 GB): m2\n" in said


@pytest.mark.slow
def test_names_are_shown_as_they_are(run_toml, tmp_path):
    few = few_machines(tmp_path, 3)
    few.write_text(few.read_text().replace("m1,", "gpu[bold],").replace("m2,", "[/x],"))
    result = alone(run_toml, few, "--stages", "2", "--visited", "2", "--microbatches", "2")
    assert result.exit_code == 0, result.output
    assert "gpu[bold]" in result.output
    assert "│ [/x]" in result.output


# --- pictures -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ending", [pytest.param("png", marks=pytest.mark.long), "svg"])
def test_a_picture_is_drawn_and_is_the_same_again(run_toml, tmp_path, ending):
    few, picture = few_machines(tmp_path, 3), tmp_path / f"plan.{ending}"
    options = ["--stages", "2", "--visited", "2", "--microbatches", "3"]
    drawn = []
    for _ in range(2):
        result = alone(run_toml, few, *options, "--picture", str(picture))
        assert result.exit_code == 0, result.output
        drawn.append(picture.read_bytes())
    assert drawn[0] == drawn[1]
    assert drawn[0].startswith(b"\x89PNG" if ending == "png" else b"<?xml")


@pytest.mark.slow
def test_a_picture_shows_every_kind_of_iteration(run_toml, tmp_path):
    few, picture = few_machines(tmp_path, 3), tmp_path / "plan.svg"
    options = ["--stages", "3", "--visited", "2", "--microbatches", "2", "--full-every", "2"]
    assert alone(run_toml, few, *options, "--picture", str(picture)).exit_code == 0
    comments = re.findall(r"<!-- (.*?) -->", picture.read_text())
    titles = [comment for comment in comments if comment.endswith(" s") and ":" in comment]
    assert [title.partition(":")[0] for title in titles] == [
        "full pipeline",
        "SkipPipe",
        "SkipPipe, nothing skipped",
    ]
    assert {"m0  stage 0", "forward", "loss", "backward", "seconds"} <= set(comments)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("plan.gif", "plan.gif: must end in .png or .svg"),
        ("plan", "plan: must end in .png or .svg"),
        ("nowhere/plan.png", "nowhere/plan.png: No such file or directory"),
        ("folder.svg", "folder.svg: Is a directory"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_told_before_the_planning(
    run_toml, tmp_path, monkeypatch, name, sentence
):
    (tmp_path / "folder.svg").mkdir()
    monkeypatch.setattr("peer.cli.plan.what_if", pytest.fail)
    result = planned(run_toml, "--picture", str(tmp_path / name))
    assert result.exit_code == 2
    assert result.stderr.startswith("loco-peer: ")
    assert result.stderr.endswith(f"{sentence}\n")


def test_without_matplotlib_a_picture_is_refused(run_toml, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = planned(run_toml, "--picture", str(tmp_path / "plan.png"))
    assert result.exit_code == 2
    told = "pip install 'loco-peer[plot]', or leave --picture out"
    assert result.stderr == f"loco-peer: --picture needs matplotlib: {told}\n"
    assert not (tmp_path / "plan.png").exists()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [Requirement(each).name for each in extras["optional-dependencies"]["plot"]] == [
        "matplotlib"
    ]


# --- what is wrong --------------------------------------------------------------------------------


def test_a_file_that_is_no_text_is_told_with_its_line(run_toml, tmp_path):
    peers = tmp_path / "mine.csv"
    peers.write_bytes(
        b"peer,location,compute_s,slots,price_per_hour\nMunich,LA,1,1,1\nK\xf6ln,LA,1,1,1\n"
    )
    result = planned(run_toml, peers=peers)
    assert result.exit_code == 2
    assert result.stderr == f"loco-peer: {peers} line 3: not UTF-8 text; save it as UTF-8\n"


def test_a_wrong_line_ends_with_code_2_and_is_named(run_toml, tmp_path):
    peers = tmp_path / "mine.csv"
    peers.write_text("peer,location,compute_s,slots,price_per_hour\na,LA,quick,1,1\n")
    result = planned(run_toml, peers=peers)
    assert result.exit_code == 2
    assert result.stderr == "loco-peer: mine.csv line 2: compute_s is 'quick', not a number\n"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--codec", "zip"], "unknown codec 'zip': use fp32, bf16, int8"),
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
