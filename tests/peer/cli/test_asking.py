"""`loco-peer new` without arguments: what is asked, and what comes of the answers."""

import os
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from terminals import Terminal, in_terminal
from typer.testing import CliRunner

from peer.cli import asking
from peer.cli.app import app
from peer.cli.asking import NEXT, ONE, SEVERAL, answers_of, check_file, free_name, put
from peer.cli.new import preset_spec
from peer.options.config import ConfigError
from protocol.run.run_spec import parse_toml


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def answered(**answers: str) -> tuple[list[str], str, list[str], list[str]]:
    """Arguments, what comes next, names of the questions, and all that was said.

    An answer of several lines is given line by line.
    """
    left = {name: lines.split("\n") for name, lines in answers.items()}
    names, said = list[str](), list[str]()

    def read(prompt: str) -> str:
        name = prompt.partition(" ")[0]
        names.append(name)
        lines = left.get(name, [])
        return lines.pop(0) if lines else ""

    arguments, then = answers_of(partial(put, read=read, say=said.append))
    assert not any(left.values())
    return arguments, then, names, said


ALL = ["file", "preset", "data", "machines", "stages", "method", "seed"]


def test_enter_takes_every_default() -> None:
    arguments, then, names, said = answered()
    assert (arguments, then, names) == (["run.toml"], NEXT[SEVERAL], ALL)
    assert len(said) == len(ALL)
    assert all(sentence.strip().endswith(".") for sentence in said)


def test_one_machine_is_asked_for_neither_stages_nor_method() -> None:
    arguments, then, names, _ = answered(machines=ONE)
    assert (arguments, then) == (["run.toml"], NEXT[ONE])
    assert names == ["file", "preset", "data", "machines", "seed"]


def test_stages_average_in_one_way_so_it_is_not_asked_for() -> None:
    arguments, _, names, said = answered(preset="1b", stages="2")
    assert arguments == ["run.toml", "--preset", "1b", "--stages", "2"]
    assert "method" not in names
    assert any("too large for one machine" in s and "GPU" in s and "GB" in s for s in said)


def test_answers_become_arguments_of_the_same_run_spec() -> None:
    given = {"preset": "125m", "data": "text:my books/*.txt", "method": "diloco", "seed": "7"}
    arguments, *_ = answered(file="mine.toml", **given)
    assert CliRunner().invoke(app, ["new", *arguments]).exit_code == 0
    assert parse_toml(Path("mine.toml").read_text()) == preset_spec(
        "125m", "diloco", data="text:my books/*.txt", seed=7
    )


@pytest.mark.parametrize(
    ("name", "wrong", "right", "reason"),
    [
        ("file", "no/run.toml", "x.toml", "there is no folder no"),
        ("file", "--force", "x.toml", "looks like an option"),
        ("preset", "13b", "125m", "unknown preset '13b': use demo or 125m or 1b"),
        ("data", "books/*.txt", "text:b", "for text files write text:books/*.txt"),
        ("machines", "2", "one", "use one or several"),
        ("stages", "two", "2", "use a whole number"),
        ("stages", "9", "4", "'demo' has 4 layers"),
        ("method", "fedavg", "streaming", "unknown method 'fedavg'"),
        ("seed", "-1", "1", "must be from 0"),
    ],
)
def test_a_wrong_answer_is_asked_for_again_with_the_reason(name, wrong, right, reason) -> None:
    arguments, _, names, said = answered(**{name: f"{wrong}\n{right}"})
    assert names.count(name) == 2
    assert reason in said[ALL.index(name) + 1]
    assert wrong not in arguments
    assert right in arguments or name == "machines"


def test_a_file_that_is_there_is_not_proposed_nor_taken() -> None:
    Path("run.toml").write_text("mine")
    assert free_name(Path()) == "run-2.toml"
    with pytest.raises(ConfigError, match="exists already: use another name"):
        check_file("run.toml")
    assert answered()[0] == ["run-2.toml"]


# --- in a real terminal ---------------------------------------------------------------------------
@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOCO_")}
    root = str(Path(asking.__file__).parents[2])
    command = [sys.executable, "-c", "from peer.cli import main; main()", "new"]
    with in_terminal(command, tmp_path, environment | {"PYTHONPATH": root}) as running:
        yield running


@pytest.mark.slow
def test_a_person_answers_in_a_terminal_and_gets_the_command(terminal, tmp_path: Path) -> None:
    for name, answer in zip(
        ALL, ["", "125M\n125m", "text:books/*.txt", "", "", "", "3"], strict=True
    ):
        terminal.until(f"{name} [")
        terminal.send(f"{answer}\n")
    assert terminal.code() == 0
    assert "unknown preset '125M': use demo or 125m or 1b" in terminal.shown
    shown = terminal.rest()
    line = "loco-peer new run.toml --preset 125m --data 'text:books/*.txt' --seed 3"
    assert f"The same without questions:\n  {line}\n{NEXT[SEVERAL]}\n" in shown
    assert shown.endswith("wrote run.toml; read it, then run: loco-peer start run.toml\n")
    written = (tmp_path / "run.toml").read_text()
    (tmp_path / "run.toml").unlink()
    assert CliRunner().invoke(app, shlex.split(line)[1:]).exit_code == 0
    assert (tmp_path / "run.toml").read_text() == written


@pytest.mark.slow
@pytest.mark.parametrize(("key", "code"), [("\x03", 130), ("\x04", 1)], ids=["ctrl-c", "ctrl-d"])
def test_leaving_off_leaves_nothing_behind(terminal, tmp_path: Path, key: str, code: int) -> None:
    terminal.until("file [run.toml]: ")
    terminal.send("mine.toml\n")
    terminal.until("preset [demo]: ")
    assert terminal.leave(key) == code
    assert "nothing was written" in terminal.shown
    assert "Traceback" not in terminal.shown
    assert list(tmp_path.iterdir()) == []


def test_outside_a_terminal_it_is_wrong_usage_as_ever() -> None:
    result = CliRunner().invoke(app, ["new"])
    assert result.exit_code == 2
    assert "Missing argument 'RUN.toml'" in result.stderr
