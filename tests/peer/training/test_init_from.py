"""A run from a checkpoint has the tokenizer of the checkpoint, or is refused before it starts.

Checkpoints and tokenizers are files as Hugging Face writes them; only what is read of them is here.
"""

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from peer.training.corpus.tokenizer import ByteTokenizer, tokenizer_file
from peer.training.init_from import rate_hint, with_checkpoint
from protocol.errors import InvalidRunSpec
from protocol.run.families import FAMILIES
from protocol.run.run_spec import parse_toml

WORDS = {"the": 0, "a": 1, "cat": 2}
OTHER_WORDS = {"a": 0, "the": 1, "cat": 2}


def tokenizer_of(folder: Path, words: dict[str, int]) -> Path:
    folder.mkdir(exist_ok=True)
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder


def checkpoint(folder: Path, words: dict[str, int] | None = WORDS, **config: Any) -> Path:
    folder.mkdir()
    if words is not None:
        tokenizer_of(folder, words)
    told = {"model_type": "llama", "vocab_size": 300} | config
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def toml_of(source: object, tokenizer: object = None) -> str:
    named = "" if tokenizer is None else f"[data]\ntokenizer = '{tokenizer}'\n"
    return f"{named}[model]\ninit_from = '{source}'\n"


def founded(source: object, tokenizer: object = None) -> str:
    """The tokenizer of the run that such a text founds."""
    return with_checkpoint(parse_toml(toml_of(source, tokenizer))).data.tokenizer


def test_the_tokenizer_follows_the_checkpoint_where_none_is_named(tmp_path):
    source = checkpoint(tmp_path / "hf")
    assert founded(source) == str(source)


def test_an_export_of_bytes_is_of_bytes_again(tmp_path):
    """As `export` writes it: by way of transformers, with a token for the end."""
    source = checkpoint(tmp_path / "hf", words=None)
    path = source / "tokenizer.json"
    path.write_bytes(ByteTokenizer().to_json())
    PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="\0").save_pretrained(source)
    assert founded(source) == "bytes"
    assert founded(source, "bytes") == "bytes"


def test_one_that_is_named_must_be_the_checkpoints(tmp_path):
    source = checkpoint(tmp_path / "hf")
    same = tokenizer_of(tmp_path / "same", {**WORDS, "dog": 3})
    assert founded(source, same) == str(same), "a token of its own harms none of the others"
    for other in ("bytes", tokenizer_of(tmp_path / "other", OTHER_WORDS)):
        with pytest.raises(InvalidRunSpec, match=r"is not the tokenizer of.*leave data\.tokenizer"):
            founded(source, other)


def test_a_checkpoint_without_a_tokenizer_wants_one_named(tmp_path):
    source = checkpoint(tmp_path / "hf", words=None)
    with pytest.raises(InvalidRunSpec, match=r"has no tokenizer\.json: name the tokenizer"):
        founded(source)
    assert founded(source, "bytes") == "bytes"


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt2", None])
def test_an_unknown_family_is_refused_by_its_config(tmp_path, family):
    source = checkpoint(tmp_path / "hf", model_type=family)
    with pytest.raises(InvalidRunSpec, match=f"{family!r} model, and these families are supp"):
        founded(source)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_follows_the_checkpoint_where_none_is_named(tmp_path, family):
    source = checkpoint(tmp_path / "hf", model_type=family)
    assert founded(source) == str(source)
    assert with_checkpoint(parse_toml(toml_of(source))).model.family == family
    named = parse_toml(toml_of(source) + f"family = '{family}'")
    assert with_checkpoint(named).model.family == family
    other = parse_toml(toml_of(source) + f"family = '{'phi' if family == 'llama' else 'llama'}'")
    with pytest.raises(InvalidRunSpec, match=r"leave model\.family out"):
        with_checkpoint(other)


def test_keys_of_a_mixture_may_stand_beside_its_checkpoint(tmp_path):
    source = checkpoint(tmp_path / "hf", model_type="mixtral")
    assert with_checkpoint(parse_toml(toml_of(source) + "experts = 4")).model.family == "mixtral"


def test_a_successor_with_old_texts_is_not_warned_of_its_rate(tmp_path):
    text = toml_of(checkpoint(tmp_path / "hf")) + "[optimizer]\nlearning_rate = 1e-3\n"
    assert rate_hint(parse_toml(text)) is not None
    assert rate_hint(parse_toml(text + "[data]\nreplay = 'stdlib'")) is None


def test_quantised_weights_are_refused(tmp_path):
    source = checkpoint(tmp_path / "hf", quantization_config={"quant_method": "fp8"})
    with pytest.raises(InvalidRunSpec, match="is quantised"):
        founded(source)


def test_a_tokenizer_must_fit_the_embeddings(tmp_path):
    with pytest.raises(InvalidRunSpec, match="2 embeddings.*3 tokens"):
        founded(checkpoint(tmp_path / "hf", vocab_size=2))


@pytest.mark.parametrize("config", ["[]", "{", '{"model_type": "llama", "vocab_size": "many"}'])
def test_a_config_that_makes_no_sense_is_refused(tmp_path, config):
    source = checkpoint(tmp_path / "hf")
    (source / "config.json").write_text(config)
    with pytest.raises(InvalidRunSpec, match=r"^model\.init_from: "):
        founded(source)


def test_what_is_nowhere_is_refused_with_the_reason(tmp_path, monkeypatch):
    with pytest.raises(InvalidRunSpec, match="there is no .*/nowhere.*cannot be a name on the hub"):
        founded(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRunSpec, match=r"there is no config\.json in .*/empty"):
        founded(tmp_path / "empty")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # the client's own means
    with pytest.raises(InvalidRunSpec, match=r"the hub \(.*\) cannot be reached"):
        founded("some-lab/some-model")
    with pytest.raises(ValueError, match=r"tokenizer: .*cannot be reached.*or give a folder"):
        tokenizer_file("some-lab/some-model")
    with pytest.raises(InvalidRunSpec, match=r"data\.tokenizer: .*cannot be reached"):
        with_checkpoint(parse_toml("[data]\ntokenizer = 'some-lab/some-model'"))


def test_a_rate_for_training_from_nothing_is_told(tmp_path):
    spec = parse_toml(toml_of("somewhere"))
    assert "2e-05" in (rate_hint(spec) or "")
    assert rate_hint(parse_toml(toml_of("somewhere") + "[optimizer]\nlearning_rate = 3e-5")) is None
    assert rate_hint(parse_toml("")) is None
