"""`loco-peer measure`: this machine's row, which `plan` reads."""

import itertools
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from peer.cli import measure
from peer.cli.app import app
from peer.cli.measure import add_row, measure_machine
from peer.options.config import ConfigError
from peer.training import model as model_module
from peer.training import step
from peer.training.model import FlatModel
from protocol.pipeline.tables import parse_peers
from protocol.run.run_spec import parse_toml

TINY = """
model.hidden_size = 16
model.intermediate_size = 32
model.num_layers = 1
model.num_heads = 2
model.context_length = 8
training.batch_size = 4
"""
ROW = {
    "peer": "me",
    "location": "Iowa",
    "compute_s": "0.5",
    "slots": "4",
    "price_per_hour": "2",
    "memory_gb": "24.0",
}


@pytest.mark.slow
def test_a_row_that_plan_reads_is_printed_and_added(tmp_path: Path):
    run_toml, peers = tmp_path / "run.toml", tmp_path / "peers.csv"
    run_toml.write_text(TINY)
    call = ["measure", str(run_toml), "--device", "cpu", "--seconds", "0", "--name", "me"]
    printed = CliRunner().invoke(app, call)
    assert printed.exit_code == 0, printed.output
    assert "tokens/s alone" in printed.output.splitlines()[0]
    (offer,) = parse_peers(printed.output)
    assert (offer.name, offer.location, offer.card) == ("me", "here", None)
    assert offer.memory_bytes is not None
    assert offer.memory_bytes > 10**8
    added = CliRunner().invoke(app, [*call, "--peers", str(peers), "--location", "Iowa"])
    assert added.exit_code == 0, added.output
    planned = CliRunner().invoke(app, ["plan", str(run_toml), "--peers", str(peers)])
    assert planned.output.startswith("This machine: ")


@pytest.mark.slow
def test_what_a_trainer_goes_on_after_is_measured_as_it_goes_on(monkeypatch):
    """A compiler that fails, and then too little memory for a sequence whose layers keep all."""
    failures = [torch.OutOfMemoryError("out of memory"), RuntimeError("no compiler")]

    class Failing(FlatModel):
        def loss(self, tokens_BT: torch.Tensor) -> torch.Tensor:
            if failures:
                raise failures.pop()
            assert not self.is_compiled
            assert not self.recompute(), "it does already"
            return super().loss(tokens_BT)

    monkeypatch.setattr(model_module, "GPU", "cpu")
    monkeypatch.setattr(torch, "compile", lambda module: module.forward)
    monkeypatch.setattr(measure, "FlatModel", Failing)
    found = measure_machine(parse_toml(TINY + "training.compile = 'auto'"), "cpu", 0)
    assert found.tokens_per_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("on_gpu", [False, True])
def test_layers_are_computed_again_where_a_trainer_would(monkeypatch, on_gpu):
    """Of a device that holds one sequence, or four whose layers are computed again."""
    tried = []

    class Full(FlatModel):
        def loss(self, tokens_BT: torch.Tensor) -> torch.Tensor:
            tried.append((len(tokens_BT), self.recomputes))
            if len(tokens_BT) > (4 if self.recomputes else 1):
                raise torch.OutOfMemoryError("out of memory")
            return super().loss(tokens_BT)

    if on_gpu:
        fewest = property(lambda stepper: 2 - stepper._model.recomputes)
        monkeypatch.setattr(step.Stepper, "fewest", fewest)
    monkeypatch.setattr(measure, "FlatModel", Full)
    found = measure_machine(parse_toml(TINY), "cpu", 60, clock_s=iter(range(1000)).__next__)
    assert found.sequences == (4 if on_gpu else 1)
    assert tried[-1] == (found.sequences, on_gpu)


@pytest.mark.slow
def test_speed_is_that_of_the_whole_batch_by_the_clock():
    """Every look at the clock is a second later, so a step and an optimizer take one each."""
    ticks = itertools.count()
    found = measure_machine(parse_toml(TINY), "cpu", 0, clock_s=lambda: float(next(ticks)))
    assert found.sequences == 1
    assert found.tokens_per_s == 4 * 8 / 1.0, "all of a step is the optimizer's here"
    assert found.forward_s == pytest.approx(8 / 32 / 3)


def test_a_row_goes_under_the_columns_that_are_there(tmp_path: Path):
    path = tmp_path / "peers.csv"
    add_row(path, ROW)
    assert path.read_text().splitlines()[1] == "me,Iowa,0.5,4,2,24.0"
    path.write_text("# mine\npeer,location,price_per_hour,card,compute_s\nb,LA,1,H100,")
    add_row(path, ROW)
    assert path.read_text().splitlines()[2:] == ["b,LA,1,H100,", "me,Iowa,2,,0.5"]
    assert len(parse_peers(path.read_text(), forward_flops=1e12)) == 2


def test_a_table_of_cards_by_name_gets_a_column_for_what_was_measured(tmp_path: Path):
    path = tmp_path / "peers.csv"
    path.write_text("# on offer\npeer,location,card,price_per_hour\na,Iowa,RTX 4090,0.4\n")
    add_row(path, ROW)
    text = path.read_text()
    assert text.splitlines()[1] == "peer,location,card,price_per_hour,compute_s"
    assert text.splitlines()[2] == "a,Iowa,RTX 4090,0.4,"
    assert text.splitlines()[3].startswith("me,Iowa,")
    assert len(parse_peers(text, forward_flops=1e12)) == 2


def test_a_table_without_a_place_for_it_is_left_alone(tmp_path: Path):
    path = tmp_path / "peers.csv"
    path.write_text("a,b,c\n")
    with pytest.raises(ConfigError, match="its first line must name peer, location and price"):
        add_row(path, ROW)
    assert path.read_text() == "a,b,c\n"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--device", "tpu"], "--device: use 'cpu', 'cuda' or 'cuda:N'"),
        (["--threads", "0"], "--threads: must be from 1"),
    ],
)
def test_wrong_options_end_with_code_2(tmp_path: Path, more: list[str], sentence: str):
    (tmp_path / "run.toml").write_text(TINY)
    result = CliRunner().invoke(app, ["measure", str(tmp_path / "run.toml"), *more])
    assert result.exit_code == 2
    assert sentence in result.stderr
