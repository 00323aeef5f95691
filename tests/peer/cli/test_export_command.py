"""`loco-peer export`: from the state file of the daemon to a checkpoint for transformers."""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import trio
from checkpoint_worlds import write
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from peer.cli import export
from peer.cli.app import app
from peer.cli.export import ExportFailed, OwnState, export_state
from peer.content.state_file import write_state
from peer.daemon.control_requests import ControlRequests
from peer.daemon.run import export_finished
from peer.observe.control import serve_control
from peer.observe.events import EventLog
from peer.options.config import ConfigError
from peer.options.exit_codes import ExitCode
from peer.state.checkpoints import TRAINER_FILE, Checkpoint, CheckpointStore
from peer.state.home import Home, HomeError
from peer.training.model import model_shapes
from protocol.membership.group import WHOLE_MODEL
from protocol.run.layout import Layout, stage_layouts
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.wire.content_messages import StateScalars

pytestmark = pytest.mark.slow

SPEC = RunSpec.model_validate(
    {"model": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2}}
)
BYTE_VOCABULARY = 256


def home_of(spec: RunSpec, folder: Path) -> Home:
    founder = Ed25519PrivateKey.from_private_bytes(b"f" * 32)
    made = Home(folder)
    made.prepare()
    made.bind_run(SignedSpec.signed_by(spec, founder.public_key().public_bytes_raw(), founder.sign))
    return made


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return home_of(SPEC, tmp_path / "home")


@pytest.fixture
def state(home: Home) -> Path:
    layout = Layout.from_shapes(model_shapes(SPEC, BYTE_VOCABULARY))
    phi_P = np.arange(layout.padded_parameters, dtype=np.float32) / 1e6
    path = home.state_dir / "now.state"
    scalars = StateScalars("ab" * 16, 3, 180, layout.digest, 0, 0, 99, 0.5)
    write_state(path, scalars, phi_P, np.full_like(phi_P, 7.0))
    return path


def test_the_slow_weights_are_exported(home: Home, state: Path, tmp_path: Path) -> None:
    written = {"path": str(state), "part": WHOLE_MODEL, "round": 3, "tokens": 99}
    export_state(OwnState(home, written), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    layout = Layout.from_shapes(model_shapes(SPEC, BYTE_VOCABULARY))
    entry = next(e for e in layout.entries if e.name == "model.embed_tokens.weight")
    embeddings: Any = model.get_input_embeddings()
    first = embeddings.weight.detach().numpy().ravel()[:3]
    assert first.tolist() == pytest.approx([(entry.offset + i) / 1e6 for i in range(3)])
    assert '"round": 3' in (tmp_path / "hf" / "loco_peer.json").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("h\u00e9")["input_ids"] == [104, 195, 169]


def test_a_state_of_another_size_is_refused(home: Home, state: Path, tmp_path: Path) -> None:
    with state.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ExportFailed, match="the run's model needs"):
        export_state(OwnState(home, {"path": str(state), "part": WHOLE_MODEL}), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_folder_that_holds_something_else_is_refused(
    home: Home, state: Path, tmp_path: Path
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").touch()
    with pytest.raises(ConfigError, match="not empty"):
        export_state(OwnState(home, {"path": str(state), "part": WHOLE_MODEL}), tmp_path / "hf")


def test_a_home_without_a_run_has_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(HomeError, match="belongs to no run"):
        export_state(OwnState(Home(tmp_path), {}), tmp_path / "hf")


def test_a_model_is_put_together_from_its_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 3, "num_heads": 2}
    spec = RunSpec.model_validate({"model": model, "pipeline": {"stages": 2}})
    home = home_of(spec, tmp_path / "home")
    layouts = stage_layouts(Layout.from_shapes(model_shapes(spec, BYTE_VOCABULARY)), 2)
    vectors = [
        np.arange(layout.padded_parameters, dtype=np.float32) / 1e5 + stage
        for stage, layout in enumerate(layouts)
    ]
    state, other = home.state_dir / "now.state", home.state_dir / "stage-0.f32"
    scalars = StateScalars("ab" * 16, 3, 180, layouts[1].digest, 0, 0, 99, 0.5)
    write_state(state, scalars, vectors[1], np.zeros_like(vectors[1]))
    vectors[0].tofile(other)

    def fetched(_home: Home, *request: object, **asked: object) -> dict[str, str]:
        assert request[0] == "fetch_weights"
        size = layouts[0].padded_parameters
        assert asked == {"part": "stage/0", "padded_parameters": size, "peer": None}
        return {"path": str(other)}

    monkeypatch.setattr(export, "ask_now", fetched)
    export_state(OwnState(home, {"path": str(state), "part": "stage/1"}), tmp_path / "hf")
    assert not other.exists()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    for layout, values in zip(layouts, vectors, strict=True):
        for entry in layout.entries:
            expected = values[entry.offset : entry.offset + entry.size]
            assert np.array_equal(found[entry.name].numpy().ravel(), expected)


# --- without a daemon -----------------------------------------------------------------------------
def keep(home: Home, step: float, value: float, part: str = WHOLE_MODEL) -> Checkpoint:
    """A checkpoint of the home's run, all slow weights of which have this value."""
    signed = home.run()
    assert signed is not None
    layout = Layout.from_shapes(model_shapes(SPEC, BYTE_VOCABULARY))
    return write(
        CheckpointStore(home.checkpoints_dir, keep=3),
        value,
        step=step,
        part=part,
        run_id=signed.run_id,
        layout_digest=layout.digest,
        padded_parameters=layout.padded_parameters,
        tokens=77,
    )


def loco(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_without_a_daemon_the_newest_checkpoint_that_is_whole_is_exported(
    home: Home, tmp_path: Path
) -> None:
    keep(home, 100, 1.0)
    keep(home, 200, 2.0)
    torn = keep(home, 300, 3.0)
    (torn.path / TRAINER_FILE).write_bytes(b"torn")
    ran = loco("export", "--home", str(home.root), "--hf", str(tmp_path / "hf"))
    assert ran.exit_code == ExitCode.OK, ran.stderr
    assert "taking the newest checkpoint of model here, of step 200" in ran.stderr
    assert f"{torn.path} cannot be used" in ran.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all((each == 2.0).all() for each in model.parameters())
    assert '"tokens": 77' in (tmp_path / "hf" / "loco_peer.json").read_text()
    wrote = loco("generate", "--home", str(home.root), "--prompt", "a", "--tokens", "3")
    assert wrote.exit_code == ExitCode.OK, wrote.stderr


async def test_from_a_daemon_that_has_no_state_yet_the_checkpoint_is_exported(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from one that looks who else is back."""
    keep(home, 200, 2.0)
    looks = SimpleNamespace(training=None)
    handlers = ControlRequests(cast(Any, looks)).handlers()
    with (
        tempfile.TemporaryDirectory(prefix="loco-test-") as sockets,
        monkeypatch.context() as patched,
    ):
        patched.setenv("XDG_RUNTIME_DIR", sockets)
        with home.locked():
            async with trio.open_nursery() as nursery:
                await nursery.start(serve_control, home.control_socket, handlers, print)
                arguments = ("export", "--home", str(home.root), "--hf", str(tmp_path / "hf"))
                ran = await trio.to_thread.run_sync(loco, *arguments)
                nursery.cancel_scope.cancel()
    assert ran.exit_code == ExitCode.OK, ran.stderr
    assert "taking the newest checkpoint of model here, of step 200" in ran.stderr


def test_without_daemon_and_checkpoint_there_is_nothing(home: Home, tmp_path: Path) -> None:
    ran = loco("export", "--home", str(home.root), "--hf", str(tmp_path / "hf"))
    assert ran.exit_code == ExitCode.NO_DAEMON
    assert "the home has no checkpoint either" in ran.stderr


def test_a_stage_alone_is_no_model(tmp_path: Path) -> None:
    model = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 2, "num_heads": 2}
    spec = RunSpec.model_validate({"model": model, "pipeline": {"stages": 2}})
    home = home_of(spec, tmp_path / "home")
    keep(home, 100, 1.0, part="stage/1")
    ran = loco("export", "--home", str(home.root), "--hf", str(tmp_path / "hf"))
    assert ran.exit_code == ExitCode.NO_DAEMON
    assert "a stage alone is no model" in ran.stderr


# --- at the end of a run --------------------------------------------------------------------------
@pytest.mark.long
async def test_when_a_run_is_over_its_model_is_written(home: Home, tmp_path: Path) -> None:
    """By the very command: here no daemon answers it, so it takes the checkpoint."""
    keep(home, 200, 2.0)
    lines: list[bytes] = []
    events = EventLog(lines.append, peer="me", wall_time_s=lambda: 0.0, stream=None)
    await export_finished(home, tmp_path / "hf", events)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all((each == 2.0).all() for each in model.parameters())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    await export_finished(home, tmp_path / "mine", events)
    told = [json.loads(line) for line in lines]
    assert [each["event"] for each in told] == ["RunExported", "ExportFailed"]
    assert "not empty and not an export" in told[1]["detail"]
    assert f"loco-peer export --home {home.root}" in told[1]["detail"]
