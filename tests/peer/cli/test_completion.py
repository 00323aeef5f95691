"""Completion as a person has it: a shell in a terminal, and Tab."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminals import Terminal, in_terminal, path_with_program

pytestmark = pytest.mark.slow
START = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        'source <(loco-peer completion bash); PS1=">"',
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        "autoload -Uz compinit; compinit -u -D; source <(loco-peer completion zsh); PS1='>'",
    ),
    "fish": (
        ["fish", "--no-config", "-i"],
        "loco-peer completion fish | source; function fish_prompt; printf '>'; end",
    ),
}


@pytest.fixture(params=START)
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name} here")
    (tmp_path / "some-run.toml").touch()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOCO_")}
    environment |= {"PATH": path_with_program(tmp_path), "HOME": str(tmp_path), "TERM": "xterm"}
    command, setup = START[name]
    with in_terminal(command, tmp_path, environment) as terminal:
        terminal.send(f"{setup}; echo rea''dy\n")
        terminal.until("ready")
        yield terminal


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("loco-peer compl", "loco-peer completion"),
        ("loco-peer join --boot", "loco-peer join --bootstrap"),
        ("loco-peer new x.toml --method dil", "--method diloco"),
        ("loco-peer new x.toml --preset 12", "--preset 125m"),
        ("loco-peer start --log-format js", "--log-format json"),
        ("loco-peer completion fi", "completion fish"),
        ("loco-peer start some", "start some-run.toml"),
        ("loco-peer plan some-run.toml --peers some", "--peers some-run.toml"),
    ],
)
def test_tab_completes(shell: Terminal, typed: str, completed: str) -> None:
    shell.send(f"{typed}\t")
    shell.until(completed)


def test_two_tabs_show_all_commands(shell: Terminal) -> None:
    shell.send("loco-peer \t\t")
    shown = shell.until("version")
    assert "export" in shown
    assert "start" in shown
