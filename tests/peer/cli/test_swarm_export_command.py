"""`loco-peer export --swarm`, asked of a control socket that gives the weights of several peers."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from safetensors.numpy import load_file
from test_export_command import home_of

from peer.cli import export as export_module
from peer.cli.export import ExportFailed, Given, Loss, export_swarm, mean_of
from peer.content import state_file
from peer.observe.control import ControlFailed, Handler, serve_control
from peer.state.home import Home
from peer.training.corpus.folder import prepare_corpus
from peer.training.model import model_shapes
from protocol.content.samples import MEAN_NATS, Float32Vector, shares_by_loss
from protocol.membership.group import WHOLE_MODEL
from protocol.run.layout import Layout
from protocol.run.run_spec import RunSpec
from protocol.wire.content_messages import StateScalars

pytestmark = pytest.mark.slow

MODEL = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2}
GONE = "12D3KooWdddddddd"
VALUES = {"12D3KooWaaaaaaaa": 1.0, "12D3KooWbbbbbbbb": 2.0, "12D3KooWcccccccc": 6.0}
"""What each peer's weights are a multiple of; ours first."""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """The home of a run of a tiny model on some words."""
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"text {number} that is trained on " * 5)
    data = {"source": f"text:{tmp_path}/*.txt", "validation_blocks": 2}
    spec = RunSpec.model_validate({"model": {**MODEL, "context_length": 8}, "data": data})
    made = prepare_corpus(spec, tmp_path / "home" / "cache")
    frozen = {"manifest": made.manifest_digest, "tokenizer_digest": made.manifest.tokenizer_digest}
    data_section = spec.data.model_copy(update=frozen)
    return home_of(spec.model_copy(update={"data": data_section}), tmp_path / "home")


def layout_of(home: Home) -> Layout:
    signed = home.run()
    assert signed is not None
    return Layout.from_shapes(model_shapes(signed.spec(), 256))


def unit(home: Home) -> npt.NDArray[np.float32]:
    """Weights of which each peer has a multiple, fp32 [P]."""
    rng = np.random.default_rng(3)
    return rng.normal(0, 0.01, layout_of(home).padded_parameters).astype(np.float32)


def daemon_of(home: Home) -> dict[str, Handler]:
    """What a daemon answers; peers that it is asked for give their weights but for one."""
    own, *others = VALUES

    async def status(_: dict[str, Any]) -> dict[str, Any]:
        return {"peer_id": own, "step": 180}

    async def holders(_: dict[str, Any]) -> dict[str, Any]:
        return {"peers": [others[0], GONE, *others[1:]]}

    async def write_state(_: dict[str, Any]) -> dict[str, Any]:
        path, layout = home.state_dir / "now.state", layout_of(home)
        scalars = StateScalars("ab" * 16, 3, 180, layout.digest, 0, 0, 99, 0.5)
        slow_P = unit(home) * np.float32(VALUES[own])
        state_file.write_state(path, scalars, slow_P, np.zeros_like(slow_P))
        return {"path": str(path), "part": WHOLE_MODEL, "round": 3, "tokens": 99}

    async def fetch_weights(wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["peer"] == GONE:
            raise ControlFailed("it is gone")
        path = home.state_dir / wanted["peer"]
        (unit(home) * np.float32(VALUES[wanted["peer"]])).tofile(path)
        return {"path": str(path), "step": 181}

    handlers = (status, holders, write_state, fetch_weights)
    return {handler.__name__: handler for handler in handlers}


@contextmanager
def served(home: Home) -> Iterator[None]:
    """The control socket, in a thread of its own: the command has its own event loop."""
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_control, home.control_socket, daemon_of(home), print)
            ready.set()
            await trio.to_thread.run_sync(over.wait)
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    try:
        assert ready.wait(30)
        yield
    finally:
        over.set()
        thread.join()


def multiple_of(unit_P: Float32Vector) -> Loss:
    """A loss that is least for weights that are three times the unit."""

    def loss(slow_P: Float32Vector) -> float:
        found = float(slow_P @ unit_P / (unit_P @ unit_P))
        return (found - 3) ** 2 / 1000

    return loss


def test_the_mean_of_all_that_give_their_weights_is_written_each_by_its_loss(
    home: Home,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export_module, "loss_judge", lambda *_: multiple_of(unit(home)))
    with home.locked(), served(home):
        export_swarm(home, tmp_path / "hf")
    values = np.array([*VALUES.values()])
    shares = np.exp((0.001 - (values - 3) ** 2 / 1000) / MEAN_NATS)
    mean_P = unit(home) * np.float32(np.average(values, weights=shares))
    written = load_file(tmp_path / "hf" / "model.safetensors")
    for entry in layout_of(home).entries:
        expected = mean_P[entry.offset : entry.offset + entry.size]
        np.testing.assert_allclose(written[entry.name].ravel(), expected, rtol=1e-5)
    _, *rows = capsys.readouterr().out.splitlines()
    named = [row.split()[0] for row in rows]
    assert named == ["aaaaaaaa", "bbbbbbbb", "dddddddd", "cccccccc", "mean"]
    assert "left out: it is gone" in rows[2]
    assert rows[-1].split()[1:3] == ["of", "3"]
    assert not list(home.state_dir.glob("*aaaaaaaa")), "nothing is left in the home"


def test_the_real_loss_leaves_a_lie_out(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of weights a hundred times as large is sure of what is wrong."""
    with home.locked(), served(home), pytest.MonkeyPatch.context() as patch:
        patch.setitem(VALUES, "12D3KooWcccccccc", 1e4)
        export_swarm(home, tmp_path / "hf")
    rows = {row.split()[0]: row for row in capsys.readouterr().out.splitlines()}
    assert rows["cccccccc"].endswith("left out: its loss is more than 0.1 above the median")
    losses = [float(rows[name].split()[2]) for name in ("aaaaaaaa", "bbbbbbbb")]
    assert float(rows["mean"].split()[3]) <= max(losses)


def given(folder: Path, losses: Loss, *vectors: Float32Vector) -> list[Given]:
    for number, vector in enumerate(vectors):
        vector.tofile(folder / str(number))
    return [Given(f"{n}", losses(v), folder / f"{n}") for n, v in enumerate(vectors)]


def vector(*values: float) -> Float32Vector:
    return np.array(values, np.float32)


def test_weights_with_a_good_loss_that_harm_the_mean_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two minima are equally good, such as a model's with its hidden units in another order."""

    def loss(slow_P: Float32Vector) -> float:
        return float(min(np.abs(slow_P - place).max() for place in (-1.0, 1.0)))

    peers = given(tmp_path, loss, vector(1.02, 0.99), vector(-1.0, -1.0), vector(0.98, 1.0))
    mean_P, count, mean_loss = mean_of(peers, loss)
    assert count == 2, "without the liar"
    assert mean_loss == pytest.approx(0.005, abs=0.002)
    assert np.abs(mean_P - 1).max() < 0.02, "its loss is the best of all, but ours are not forged"
    said = "1                -  left out: the mean would have a loss of 0."
    assert capsys.readouterr().out.startswith(said)


def test_losses_that_are_no_numbers_count_nothing(tmp_path: Path) -> None:
    def loss(slow_P: Float32Vector) -> float:
        return float(slow_P[0])

    peers = given(tmp_path, loss, vector(np.nan), vector(2.0), vector(np.inf))
    mean_P, count, _ = mean_of(peers, loss)
    assert (mean_P.tolist(), count) == ([2.0], 1)
    with pytest.raises(ExportFailed, match="no peer gave"):
        mean_of(peers[::2], loss)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([2.0], [1]),
        ([2.0, 2.0, 2.05], [1, 1, math.exp(-0.5)]),
        ([2.0, 2.0, 2.0, 2.11], [1, 1, 1, 0]),
        ([2.0, 5.0], [1, 0]),
        ([2.0, math.nan, math.inf], [1, 0, 0]),
    ],
)
def test_peers_count_by_their_losses_and_not_at_all_beyond_a_bound(losses, expected) -> None:
    assert shares_by_loss(losses) == pytest.approx(expected)
