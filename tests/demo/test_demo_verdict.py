"""What the shell is told of a demo that was played to its end."""

import json
import sys

import pytest
from readings import ended

import demo.__main__ as program
from demo.summary import Summary
from peer.options.exit_codes import ExitCode


@pytest.mark.parametrize(
    ("lone_loss", "code", "sentence"),
    [
        (1.95, ExitCode.OK, "every peer beats the one alone, by 0.100 nats"),
        (1.86, ExitCode.FAILURE, "THE FOUR LOSE"),
        (1.80, ExitCode.FAILURE, "THE FOUR LOSE"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_status_says_who_won(
    tmp_path, monkeypatch, capsys, lone_loss, code, sentence, as_json
):
    async def played(plan, folder, view):
        peers = [ended("a", loss=1.8), ended("b", loss=1.85), ended("c"), ended("d")]
        return Summary(peers, ended("lone", loss=lone_loss), 1_000_000)

    monkeypatch.setattr(program, "play", played)
    arguments = ["demo", "--out", str(tmp_path / "out"), *(["--json"] if as_json else [])]
    monkeypatch.setattr(sys, "argv", arguments)
    assert program.main() == code
    said = capsys.readouterr()
    assert sentence in (said.err if as_json else said.out)
    if as_json:
        assert json.loads(said.out)["won"] == (code == ExitCode.OK)
