"""`loco-peer generate`: text from an export or from a running peer, with stages left out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from transformers import AutoTokenizer, LlamaForCausalLM
from typer.testing import CliRunner, Result

from peer.cli import client
from peer.cli.app import app
from peer.cli.generate import check_left_out
from peer.content.state_file import write_state
from peer.options.config import ConfigError
from peer.options.exit_codes import ExitCode
from peer.state.export import ExportedModel, Sampling, export_hugging_face
from peer.state.export_folder import MARKER
from peer.state.home import Home
from peer.training.model import FlatModel, initial_module, model_config, model_shapes
from peer.training.stages.module import initial_stage
from protocol.run.layout import Layout
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.wire.content_messages import StateScalars

STAGES = 3
BYTE_VOCABULARY = 256
LOUD = np.float32(8)
"""Fresh weights say next to nothing about the next token; larger ones do."""
SPEC = RunSpec.model_validate(
    {
        "model": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_layers": 5,
            "num_heads": 2,
            "context_length": 64,
        },
        "pipeline": {"stages": STAGES},
    }
)


def loco(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def exported(folder: Path, spec: RunSpec = SPEC) -> Path:
    layout = Layout.from_shapes(model_shapes(spec, BYTE_VOCABULARY))
    model = FlatModel(initial_module(spec, BYTE_VOCABULARY), torch.device("cpu"))
    export_hugging_face(model.theta_P.numpy() * LOUD, spec, layout, folder)
    return folder


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("exports") / "hf")


def text_of(folder: Path, sampling: Sampling, without: tuple[int, ...] = ()) -> str:
    model, written = ExportedModel(folder), list[str]()
    model.leave_out(without)
    model.continue_text("def ", sampling, written.append)
    return "".join(written)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("without", "stages", "sentence"),
    [
        ({0}, 3, "stage 0 cannot be left out"),
        ({1, 3}, 3, "this run has no stage 3: --without-stages takes 1 to 2"),
        ({1}, 1, "not cut into stages"),
    ],
)
def test_stages_that_cannot_be_left_out_are_refused(without, stages, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_left_out(without, stages)


def test_relay_stages_can_be_left_out() -> None:
    check_left_out({1, 2}, 3)
    check_left_out(set(), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--hf", "HF", "--without-stages", "0"], ExitCode.USAGE, "stage 0 cannot be left out"),
        (["--hf", "HF", "--without-stages", "1;2"], ExitCode.USAGE, "takes numbers such as 2,3"),
        (["--hf", "HF", "--home", "x"], ExitCode.USAGE, "name two models"),
        (["--hf", "EMPTY"], ExitCode.USAGE, "is not an export"),
        (["--hf", "HF", "--tokens", "61"], ExitCode.USAGE, "reads 64 at once"),
        (["--home", "EMPTY"], ExitCode.USAGE, "belongs to no run yet"),
        (["--home", "BOUND", "--without-stages", "7"], ExitCode.USAGE, "no stage 7"),
        (["--home", "BOUND"], ExitCode.NO_DAEMON, "no daemon is running"),
    ],
)
def test_what_cannot_be_written_is_said(
    export: Path, tmp_path: Path, arguments, code, sentence
) -> None:
    (tmp_path / "empty").mkdir()
    places = {
        "HF": export,
        "EMPTY": tmp_path / "empty",
        "BOUND": bound_home(tmp_path / "home").root,
    }
    found = loco("generate", "--prompt", "abcd", *(str(places.get(a, a)) for a in arguments))
    assert (found.exit_code, sentence in found.stderr) == (code, True), found.stderr


# --- what is written ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_text_follows_from_prompt_sampling_and_stages(export: Path) -> None:
    first = text_of(export, Sampling(20))
    assert first == text_of(export, Sampling(20))
    assert first != text_of(export, Sampling(20, seed=1))
    assert first != text_of(export, Sampling(20), (1,))
    likeliest = text_of(export, Sampling(20, temperature=0))
    assert likeliest == text_of(export, Sampling(20, temperature=0, seed=1))
    assert likeliest == text_of(export, Sampling(20, temperature=1e-45))


@pytest.mark.slow
def test_a_prompt_of_one_token_is_continued(export: Path) -> None:
    found = loco("generate", "--hf", str(export), "--prompt", "d", "--tokens", "4")
    assert found.exit_code == ExitCode.OK, found.stderr
    assert found.stdout.strip("\n")


@pytest.mark.slow
def test_a_stage_takes_its_layers_with_it(export: Path) -> None:
    """The likeliest tokens are those of the stages that are left, one after the other."""
    model = ExportedModel(export)
    assert (model.stages, model.layers) == (3, 5)
    model.leave_out({1})
    assert model.layers == 3  # stage 0 holds layer 0, stage 1 layers 1 and 2, stage 2 the last two
    written = list[str]()
    model.continue_text("def ", Sampling(8, temperature=0), written.append)
    module: Any = LlamaForCausalLM.from_pretrained(export)
    module.model.layers = torch.nn.ModuleList(module.model.layers[i] for i in (0, 3, 4))
    tokens = list(b"def ")
    for _ in range(8):
        logits_1TV = module(torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits_1TV[0, -1].argmax()))
    assert "".join(written) == AutoTokenizer.from_pretrained(export).decode(tokens[4:])


@pytest.mark.slow
def test_an_export_of_before_has_no_stages_to_leave_out(tmp_path: Path) -> None:
    folder = exported(tmp_path / "hf")
    origin = json.loads((folder / MARKER).read_text())
    assert origin.pop("stages") == STAGES
    (folder / MARKER).write_text(json.dumps(origin))
    found = loco("generate", "--prompt", "x", "--hf", str(folder), "--without-stages", "1")
    assert (found.exit_code, "not cut into stages" in found.stderr) == (2, True)


def bound_home(folder: Path) -> Home:
    founder = Ed25519PrivateKey.from_private_bytes(b"f" * 32)
    home = Home(folder)
    home.prepare()
    home.bind_run(SignedSpec.signed_by(SPEC, founder.public_key().public_bytes_raw(), founder.sign))
    return home


def test_a_home_without_a_folder_for_states_has_no_daemon(tmp_path: Path) -> None:
    home = bound_home(tmp_path / "home")
    home.state_dir.rmdir()
    found = loco("generate", "--prompt", "x", "--home", str(home.root))
    assert (found.exit_code, "no daemon is running" in found.stderr) == (ExitCode.NO_DAEMON, True)


def test_a_home_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(*_asked: Any, **_arguments: Any) -> dict[str, Any]:
        return {}

    monkeypatch.setattr(client, "ask_daemon", answer)
    home = bound_home(tmp_path / "home")
    home.state_dir.rmdir()
    home.state_dir.touch()
    with home.locked():  # as a daemon does
        found = loco("generate", "--prompt", "x", "--home", str(home.root))
    assert found.exit_code == ExitCode.USAGE
    assert f"{home.state_dir} cannot be written: File exists" in found.stderr


@pytest.mark.slow
def test_a_running_peer_is_asked_for_the_stages_that_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, asked = bound_home(tmp_path / "home"), list[Any]()
    config = model_config(SPEC, BYTE_VOCABULARY)
    models = [
        FlatModel(initial_stage(config, 0, stage, STAGES), torch.device("cpu"))
        for stage in range(STAGES)
    ]

    async def ask(_home: Home, request: str, _timeout_s: float, **arguments: Any) -> dict[str, Any]:
        asked.append((request, arguments.get("part")))
        if request == "write_state":
            path, own = home.state_dir / "now.state", models[0]
            scalars = StateScalars("ab" * 16, 3, 180, own.layout.digest, 0, 0, 99, 0.5)
            theta_P = own.theta_P.numpy() * LOUD
            write_state(path, scalars, theta_P, np.zeros_like(theta_P))
            return {"path": str(path), "part": "stage/0", "round": 3, "tokens": 99}
        path, stage = home.state_dir / "fetched.f32", int(arguments["part"][-1])
        (models[stage].theta_P.numpy() * LOUD).tofile(path)
        return {"path": str(path)}

    monkeypatch.setattr(client, "ask_daemon", ask)
    arguments = ["generate", "--prompt", "def ", "--home", str(home.root), "--tokens", "12"]
    with home.locked():  # as a daemon does
        whole = loco(*arguments)
    assert whole.exit_code == 0, whole.stderr
    assert asked == [
        ("write_state", None),
        ("fetch_weights", "stage/1"),
        ("fetch_weights", "stage/2"),
    ]
    asked.clear()
    with home.locked():
        without = loco(*arguments, "--without-stages", "2")
    assert asked == [("write_state", None), ("fetch_weights", "stage/1")]
    assert (without.exit_code, without.stdout == whole.stdout) == (0, False)
    assert sorted(path.name for path in home.state_dir.iterdir()) == ["now.state"]
