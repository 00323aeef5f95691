"""`loco-peer eval --tasks`: an export is asked a small task of files here, by the real lm-eval."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_export_command import SPEC, home_of, keep, loco

from peer.cli.tasks import LIBRARY, lines_of
from peer.options.exit_codes import ExitCode

WHY = "lm-eval is not here: pip install 'loco-peer[eval]'"
needs_lm_eval = pytest.mark.skipif(find_spec(LIBRARY) is None, reason=WHY)
TASK = """
task: letters
dataset_path: json
dataset_kwargs:
  data_files: {data}
output_type: multiple_choice
test_split: train
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: ["a", "bb"]
metric_list:
  - metric: acc
"""
COUNT = 8


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """All of its weights are equal, so each token is as likely as any other."""
    home = home_of(SPEC, tmp_path / "home")
    keep(home, 200, 0.5)
    done = loco("export", "--home", str(home.root), "--hf", str(tmp_path / "hf"))
    assert done.exit_code == ExitCode.OK, done.stderr
    return tmp_path / "hf"


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = ({"text": f"{number}:", "label": int(number >= COUNT // 4)} for number in range(COUNT))
    data = folder / "letters.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    (folder / "letters.yaml").write_text(TASK.format(data=data))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.mark.slow
@needs_lm_eval
def test_a_model_for_which_all_is_alike_takes_the_shorter_answer(export: Path, tasks: Path) -> None:
    """The right one in a quarter of the examples: two letters are less likely than one."""
    asked = ("eval", "--tasks", "letters", "--hf", str(export), "--task-files", str(tasks))
    ran = loco(*asked, "--json", "--device", "cpu")
    assert ran.exit_code == ExitCode.OK, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["letters"]["acc,none"] == 1 / 4
    half = loco(*asked, "--limit", str(COUNT // 4), "--device", "cpu")
    assert half.exit_code == ExitCode.OK, half.stderr
    assert "letters  acc          1.0000 +- 0.0000" in half.stdout
    unknown = loco("eval", "--tasks", "leters", "--hf", str(export), "--task-files", str(tasks))
    assert unknown.exit_code == ExitCode.USAGE
    assert "lm-eval knows no task 'leters'; did you mean 'letters'" in unknown.stderr


@pytest.mark.slow
@needs_lm_eval
def test_the_model_of_a_home_is_asked_and_its_export_goes(
    export: Path, tasks: Path, tmp_path: Path
) -> None:
    home = ("--home", str(tmp_path / "home"))
    ran = loco("eval", "--tasks", "letters", *home, "--task-files", str(tasks), "--device", "cpu")
    assert ran.exit_code == ExitCode.OK, ran.stderr
    assert "letters  acc          0.2500" in ran.stdout
    assert list((tmp_path / "home" / "state").iterdir()) == []


@pytest.mark.slow
@needs_lm_eval
def test_what_lm_eval_cannot_load_ends_it_with_a_sentence(export: Path, tasks: Path) -> None:
    (tasks / "letters.jsonl").unlink()
    ran = loco("eval", "--tasks", "letters", "--hf", str(export), "--task-files", str(tasks))
    assert ran.exit_code == ExitCode.FAILURE
    assert "lm-eval could not ask letters: FileNotFoundError" in ran.stderr


def test_without_lm_eval_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, LIBRARY, None)
    monkeypatch.setattr("peer.cli.tasks.find_spec", lambda _: None)
    ran = loco("eval", "--tasks", "hellaswag", "--hf", str(tmp_path))
    assert ran.exit_code == ExitCode.USAGE
    assert ran.stderr == (
        "loco-peer: --tasks: lm-eval is not installed here; install it with: pip install"
        " 'loco-peer[eval]'\n"
    )


def test_a_line_for_each_task_and_metric() -> None:
    told = {
        "arc_easy": {"alias": "arc", "acc,none": 0.25, "acc_stderr,none": 0.01, "sample_len": 9},
        "gsm8k": {"exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A"},
    }
    assert list(lines_of(told)) == [
        "arc_easy  acc          0.2500 +- 0.0100",
        "gsm8k     exact_match  0.5000 (strict)",
    ]


@pytest.mark.slow
def test_a_folder_that_is_no_export_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.cli.tasks.find_spec", lambda _: True)
    ran = loco("eval", "--tasks", "hellaswag", "--hf", str(tmp_path))
    assert (ran.exit_code, "is not an export" in ran.stderr) == (ExitCode.USAGE, True)
