"""The export loads in transformers and computes what our model computes."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, pipeline

from peer.state.export import export_hugging_face
from peer.state.export_folder import MARKER
from peer.training.corpus.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer
from peer.training.model import FlatModel, initial_module
from protocol.run.layout import Layout
from protocol.run.run_spec import DataSection, ModelSection, RunSpec

pytestmark = pytest.mark.slow


def _spec(*, tied: bool = True, tokenizer: str = "bytes") -> RunSpec:
    model = ModelSection(
        hidden_size=24, intermediate_size=40, num_layers=2, num_heads=2, num_kv_heads=1,
        context_length=16, rope_theta=500.0, tie_embeddings=tied,
    )  # fmt: skip
    return RunSpec(name="tiny", model=model, data=DataSection(tokenizer=tokenizer))


def _trained(
    spec: RunSpec, vocabulary_size: int = 256
) -> tuple[torch.nn.Module, npt.NDArray[Any], Layout]:
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
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded("world hello")["input_ids"] == [1, 0]
    assert loaded.eos_token is None
    assert AutoModelForCausalLM.from_pretrained(out).config.eos_token_id is None
    with pytest.raises(ValueError, match="tokenizer"):
        export_hugging_face(phi_P, spec, layout, out)


def test_what_ended_texts_in_training_ends_them_in_generation(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"?": 0, "on": 1, "<|endoftext|>": 2}, unk_token="?"))
    spec, out = _spec(tokenizer="some/tokenizer"), tmp_path / "out"
    _, phi_P, layout = _trained(spec, vocabulary_size=3)
    export_hugging_face(phi_P, spec, layout, out, tokenizer_json=words.to_str().encode())
    assert AutoTokenizer.from_pretrained(out).eos_token_id == 2
    assert AutoModelForCausalLM.from_pretrained(out).config.eos_token_id == 2


def test_the_tokenizer_is_the_runs_to_the_byte_for_its_digest_names_the_runs_tokens(
    tmp_path: Path,
) -> None:
    words = Tokenizer(models.WordLevel({"?": 0, "on": 1, "<|endoftext|>": 2}, unk_token="?"))
    data = words.to_str(pretty=False).encode()  # as GPT-2's is: transformers would indent it
    spec, out = _spec(tokenizer="some/tokenizer"), tmp_path / "out"
    _, phi_P, layout = _trained(spec, vocabulary_size=3)
    export_hugging_face(phi_P, spec, layout, out, tokenizer_json=data)
    assert load_tokenizer(str(out)).digest == FileTokenizer(data).digest


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


# --- the byte tokenizer ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a run that trains on bytes."""
    spec, out = _spec(), tmp_path_factory.mktemp("bytes") / "out"
    _, phi_P, layout = _trained(spec)
    export_hugging_face(phi_P, spec, layout, out)
    return out


@pytest.fixture(scope="module")
def byte_tokenizer(exported: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(exported)


HARD_TEXTS = (
    "",
    " two  spaces , don 't touch .\n\n\t\r\n ",
    "\0 a zero \0\0",
    "<0x00> <0xC3> </s> <s> <unk>",
    "na\u00efve \u0100 \u2581 \ufeff \U0001f600 e\u0301 \x7f\x80",
)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts_become_their_bytes_and_come_back(
    byte_tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    tokens = byte_tokenizer(text)["input_ids"]
    assert tokens == ByteTokenizer().encode(text).tolist()
    assert byte_tokenizer.decode(tokens) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_becomes_its_bytes_and_comes_back(
    byte_tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    tokens = byte_tokenizer(text)["input_ids"]
    assert tokens == list(text.encode())
    assert byte_tokenizer.decode(tokens) == text


def test_a_zero_byte_ends_a_text(exported: Path, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    config = AutoModelForCausalLM.from_pretrained(exported).config
    assert [config.eos_token_id] == list(ByteTokenizer.separator)
    assert byte_tokenizer.eos_token_id == config.eos_token_id
    assert config.bos_token_id is None
    assert len(byte_tokenizer) == config.vocab_size == ByteTokenizer.vocabulary_size
    assert byte_tokenizer.decode([65, 0], skip_special_tokens=True) == "A"


def test_bytes_that_are_no_text_are_shown_as_such(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    assert byte_tokenizer.decode([65, 0xC3, 66]) == "A\ufffdB"


def test_a_pipeline_generates_from_the_folder_alone(exported: Path) -> None:
    torch.manual_seed(1)
    generate = pipeline("text-generation", model=str(exported))
    (said,) = generate("caf\u00e9", max_new_tokens=9, do_sample=True)
    assert said["generated_text"].startswith("caf\u00e9")
    assert len(said["generated_text"]) > len("caf\u00e9")
