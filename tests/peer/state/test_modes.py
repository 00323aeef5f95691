"""Who may read the files of a home and of an export: keys and weights are their owner's alone."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peer.content.state_file import write_state
from peer.network.identity import load_or_create
from peer.observe.events import LineFile
from peer.state.checkpoints import OUTER_FILE, TRAINER_FILE, CheckpointStore, Manifest, write_outer
from peer.state.export import export_hugging_face
from peer.state.home import Home
from peer.state.kept_files import AdmissionFile, KeptAdmission
from peer.training.corpus.folder import prepare_corpus
from peer.training.model import model_shapes
from protocol.run.layout import Layout
from protocol.run.run_spec import DataSection, RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.wire.content_messages import StateScalars

pytestmark = pytest.mark.slow

SPEC = RunSpec.model_validate(
    {"model": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2}}
)
WEIGHTS = ("state/now", OUTER_FILE)
PRIVATE = {"identity.key", "founder.key", "admission", "lock"}


def fill(home: Home, texts: Path) -> None:
    """Have the parts of a daemon write each kind of file."""
    home.prepare()
    founder = Ed25519PrivateKey.from_private_bytes(b"f" * 32)
    home.bind_run(SignedSpec.signed_by(SPEC, founder.public_key().public_bytes_raw(), founder.sign))
    home.next_incarnation()
    home.keep_port("listen", 31337)
    for path in (home.identity_path, home.founder_key_path):
        load_or_create(path)
    AdmissionFile(home.admission_path).write(KeptAdmission("run", b"secret"))
    LineFile(home.event_log_path).write_line(b"{}\n")
    texts.mkdir()
    for number in range(2):
        (texts / f"{number}.txt").write_text("text " * 2000)
    data = DataSection(source=f"text:{texts}/*.txt", validation_blocks=2)
    prepare_corpus(SPEC.model_copy(update={"data": data}), home.cache_dir)
    values = np.zeros(128, np.float32)
    write_state(
        home.state_dir / "now", StateScalars("ab" * 16, 3, 9, "", 0, 0, 9, 0.5), values, values
    )
    store = CheckpointStore(home.checkpoints_dir, keep=1)
    folder = store.begin(128)
    write_outer(folder, values, values)
    (folder / TRAINER_FILE).write_bytes(b"")
    told = {"run_id": "r", "part": "model", "layout_digest": "", "padded_parameters": 128}
    told |= {"round": 0, "step": 1.0, "epoch": 0, "position": 0, "debt": 0.0, "tokens": 0}
    told |= {"over": False, "written_s": 0.0, "version": "0", "files": {}}
    store.seal(folder, Manifest.model_validate(told))


def modes_in(folder: Path) -> dict[str, int]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in found}


def test_keys_and_weights_are_private_and_all_else_is_by_the_umask(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    home = Home(tmp_path / "home")
    fill(home, tmp_path / "texts")
    with home.locked():
        pass
    layout = Layout.from_shapes(model_shapes(SPEC, 256))
    weights_P = np.zeros(layout.padded_parameters, np.float32)
    export_hugging_face(weights_P, SPEC, layout, tmp_path / "hf")
    umask = os.umask(0)
    os.umask(umask)
    found = modes_in(home.root)
    assert found.keys() >= PRIVATE | {
        "run.json",
        "log/events.jsonl",
        "checkpoints/000001-step-1/manifest.json",
    }
    is_private = {name: name in PRIVATE or name.endswith(WEIGHTS) for name in found}
    assert sum(is_private.values()) == len(PRIVATE) + len(WEIGHTS)
    expected = {name: 0o600 if is_private[name] else 0o666 & ~umask for name in found}
    assert found == expected
    exported = modes_in(tmp_path / "hf")
    assert exported == dict.fromkeys(exported, 0o666 & ~umask)
