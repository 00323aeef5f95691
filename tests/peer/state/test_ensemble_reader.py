"""The reader in an export of experts says what protocol/experts/ensemble.py says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ensemble_worlds import export_of, run_with
from transformers import AutoModelForCausalLM

from peer.state.ensemble_reader import ExpertEnsemble
from peer.state.export_folder import ENSEMBLE_FILE, READER_FILE, check_export_folder
from protocol.experts.ensemble import Combination, ensemble_log_probs, loss_of

pytestmark = pytest.mark.slow

TEXT = "def f(x):\n    return x + 1  # the quick brown fox jumps over the lazy dog\n" * 2
CONTEXT = 32
ALL = ("general", "code", "math")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_of(tmp_path_factory.mktemp("experts") / "out", run_with())


def told_by(folder: Path, text: str, names=ALL) -> list[np.ndarray]:
    """Per block: log-probabilities of the true tokens, computed from logits here."""
    tokens, blocks = list(text.encode()), []
    models = [AutoModelForCausalLM.from_pretrained(folder / name) for name in names]
    for at in range(0, len(tokens) - 1, CONTEXT):
        block = torch.tensor(tokens[at : at + CONTEXT + 1])
        with torch.no_grad():
            each = [model(block[None, :-1]).logits[0].double().log_softmax(-1) for model in models]
        rows = [said[range(len(block) - 1), block[1:]].numpy() for said in each]
        blocks.append(np.stack(rows))
    return blocks


def loss_by(blocks, rule: Combination) -> float:
    return loss_of(np.concatenate([ensemble_log_probs(block, rule) for block in blocks]))


@pytest.mark.parametrize(
    ("discount", "share", "top"), [(1.0, 0.01, 2), (0.9, 0.0, 3), (1.0, 1.0, 1), (0.5, 0.1, 5)]
)
def test_the_loss_is_that_of_the_rule(folder: Path, tmp_path: Path, discount, share, top) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    told = json.loads((copied / ENSEMBLE_FILE).read_text())
    told["rules"] |= {"discount": discount, "fixed_share": share, "top": top}
    (copied / ENSEMBLE_FILE).write_text(json.dumps(told))
    expected = loss_by(told_by(copied, TEXT), Combination(discount, share, top))
    assert ExpertEnsemble(copied).loss(TEXT) == pytest.approx(expected, abs=1e-6)


@pytest.mark.long
def test_the_script_of_the_folder_needs_nothing_of_ours(folder: Path, tmp_path: Path) -> None:
    """A fresh process, elsewhere, in which importing loco-peer would fail."""
    moved, text = tmp_path / "moved", tmp_path / "text.txt"
    shutil.copytree(folder, moved)
    text.write_text(TEXT)
    for room in ("peer", "protocol"):
        (moved / room).mkdir()
        (moved / room / "__init__.py").write_text("raise SystemExit('loco-peer was imported')\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    arguments = ("--loss", str(text), "--prompt", "def f", "--tokens", "8")
    ran = subprocess.run(
        [sys.executable, str(moved / READER_FILE), *arguments],
        capture_output=True,
        check=False,
        cwd=tmp_path,
        env=environment,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    loss, _, written = ran.stdout.decode(errors="replace").partition("\n")
    expected = loss_by(told_by(folder, TEXT), Combination(1.0, 0.01, 2))
    assert float(loss) == pytest.approx(expected, abs=1e-5)
    assert written.strip()


def test_each_token_is_drawn_from_the_mixture(folder: Path) -> None:
    """Caches and weights that go on from token to token: as if each were asked about alone."""
    ensemble, prompt = ExpertEnsemble(folder), list(b"the fox")
    written = list(ensemble.continued("the fox", 6, temperature=0))
    for length in range(len(written)):
        text = [*prompt, *written[:length]]
        log_probs = ensemble.log_probs(text)
        weights = ensemble.even()
        for now in log_probs.unbind(1):
            weights = ensemble.learned(weights, now)
        with torch.no_grad():
            each = [model(torch.tensor([text])).logits[0, -1] for model in ensemble.models]
        said = torch.stack([one.double().log_softmax(-1) for one in each])
        together = (ensemble.best(weights)[:, None] + said).logsumexp(0)
        assert int(together.argmax()) == written[length]
    assert list(ensemble.continued("the fox", 6, seed=1)) == list(
        ensemble.continued("the fox", 6, seed=1)
    )


def test_experts_of_unequal_sizes_answer_together(tmp_path: Path) -> None:
    models = {"code": {"num_layers": 1}, "math": {"hidden_size": 64}}
    ensemble = ExpertEnsemble(export_of(tmp_path / "out", run_with(models=models)))
    expected = loss_by(told_by(tmp_path / "out", TEXT), Combination(1.0, 0.01, 2))
    assert ensemble.loss(TEXT) == pytest.approx(expected, abs=1e-6)


def test_a_generalist_that_is_no_anchor_does_not_answer(tmp_path: Path) -> None:
    ensemble = ExpertEnsemble(export_of(tmp_path / "out", run_with(anchor="none")))
    assert ensemble.names == ["code", "math"]
    expected = loss_by(told_by(tmp_path / "out", TEXT, ("code", "math")), Combination(1.0, 0.01, 2))
    assert ensemble.loss(TEXT) == pytest.approx(expected, abs=1e-6)


# --- what is refused ------------------------------------------------------------------------------
def remove_an_expert(folder: Path) -> None:
    shutil.rmtree(folder / "code")


def change_weights(folder: Path) -> None:
    path = folder / "math" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def change_a_tokenizer(folder: Path) -> None:
    path = folder / "code" / "tokenizer.json"
    path.write_text(path.read_text().replace('"version"', '"version" '))


def forget_the_list(folder: Path) -> None:
    (folder / ENSEMBLE_FILE).unlink()


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (remove_an_expert, "code is missing: export the run again"),
        (change_weights, "model.safetensors is not the file that was exported"),
        (change_a_tokenizer, "the tokenizers of code and general differ"),
        (forget_the_list, "has no ensemble.json"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(folder, tmp_path: Path, harm, sentence) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    harm(copied)
    with pytest.raises(ValueError, match=sentence):
        ExpertEnsemble(copied)


def test_vocabularies_that_differ_are_refused(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    model = AutoModelForCausalLM.from_pretrained(copied / "code")
    model.resize_token_embeddings(300, mean_resizing=False)
    model.save_pretrained(copied / "code")
    told = json.loads((copied / ENSEMBLE_FILE).read_text())
    told["experts"][1]["sha256"] = {}
    (copied / ENSEMBLE_FILE).write_text(json.dumps(told))
    with pytest.raises(ValueError, match="vocabularies of the experts differ"):
        ExpertEnsemble(copied)


@pytest.mark.parametrize(
    ("prompt", "tokens", "sentence"),
    [
        ("", 1, "the prompt is empty"),
        ("x" * 30, 3, "reads 32 at once"),
        ("x" * 32, None, "reads 32"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(folder: Path, prompt, tokens, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        list(ExpertEnsemble(folder).continued(prompt, tokens))


def test_an_export_of_experts_may_be_renewed(folder: Path) -> None:
    check_export_folder(folder)
