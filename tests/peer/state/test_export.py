"""The export loads in transformers and computes what our model computes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from peer.state.export import MARKER, export_hugging_face
from peer.training.model import FlatModel, initial_module
from protocol.layout import Layout
from protocol.run_spec import DataSection, ModelSection, RunSpec

pytestmark = pytest.mark.slow


def _spec(*, tied: bool = True, tokenizer: str = "bytes") -> RunSpec:
    model = ModelSection(
        hidden_size=24, intermediate_size=40, num_layers=2, num_heads=2, num_kv_heads=1,
        context_length=16, rope_theta=500.0, tie_embeddings=tied,
    )  # fmt: skip
    return RunSpec(name="tiny", model=model, data=DataSection(tokenizer=tokenizer))


def _trained(
    spec: RunSpec, vocabulary_size: int = 256
) -> tuple[torch.nn.Module, np.ndarray, Layout]:
    """A model whose every parameter was moved, its flat vector and its layout."""
    module = initial_module(spec.model_copy(update={"seed": 1}), vocabulary_size)
    flat = FlatModel(module, torch.device("cpu"))
    flat.theta_P += 0.1 * torch.randn(
        flat.theta_P.shape, generator=torch.Generator().manual_seed(2)
    )
    return module, flat.theta_P.detach().numpy().copy(), flat.layout


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_ours(tmp_path: Path, tied: bool) -> None:
    spec = _spec(tied=tied)
    module, phi_P, layout = _trained(spec)
    export_hugging_face(phi_P, spec, layout, tmp_path / "out", round=3, tokens=99)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours, theirs = module(input_ids=tokens).logits, loaded(input_ids=tokens).logits
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    assert not list(tmp_path.glob(".*partial"))


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    spec = _spec(tokenizer="some/tokenizer")
    _, phi_P, layout = _trained(spec, vocabulary_size=3)
    out = tmp_path / "out"
    export_hugging_face(phi_P, spec, layout, out, tokenizer_json=words.to_str().encode())
    assert AutoTokenizer.from_pretrained(out)("world hello")["input_ids"] == [1, 0]
    with pytest.raises(ValueError, match="tokenizer"):
        export_hugging_face(phi_P, spec, layout, out)


def test_an_export_may_be_renewed_but_nothing_else_is_touched(tmp_path: Path) -> None:
    spec, out, foreign = _spec(), tmp_path / "out", tmp_path / "foreign"
    _, phi_P, layout = _trained(spec)
    export_hugging_face(phi_P, spec, layout, out)
    (out / "notes.txt").write_text("mine")
    export_hugging_face(phi_P * 2, spec, layout, out)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    entry = next(e for e in layout.entries if e.name == "model.norm.weight")
    expected = 2 * phi_P[entry.offset : entry.offset + entry.size]
    np.testing.assert_array_equal(loaded.model.norm.weight.detach().numpy(), expected)
    assert (out / "notes.txt").read_text() == "mine"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="not an export"):
        export_hugging_face(phi_P, spec, layout, foreign)
    assert not (foreign / MARKER).exists()


def test_a_vector_or_layout_of_another_model_is_refused(tmp_path: Path) -> None:
    spec = _spec()
    _, phi_P, layout = _trained(spec)
    with pytest.raises(ValueError, match="do not fit"):
        export_hugging_face(phi_P[:-128], spec, layout, tmp_path / "out")
    with pytest.raises(ValueError, match="not that of"):
        export_hugging_face(phi_P, _spec(tied=False), layout, tmp_path / "out")
    assert not list(tmp_path.iterdir())
