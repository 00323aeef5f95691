"""`make gpu` without a card, and what its JSON says of where it was measured."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from bench import gpu


def test_without_a_card_it_ends_with_a_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("finds no CUDA card here\n")
    assert not (tmp_path / "out").exists()


def test_figures_of_before_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make gpu` names the same folder each time."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert f"{tmp_path} exists already" in capsys.readouterr().err


def test_figures_name_versions_and_commit_and_what_cannot_be_asked_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = gpu.measured_on()
    assert told["versions"]["torch"] == version("torch")
    assert told["machine"]["cores"]
    monkeypatch.setenv("PATH", "/nowhere")
    assert (gpu.measured_on()["cards"], gpu.measured_on()["commit"]) == ([], "")
