"""A checkpoint that a run begins from: looked at before anything is started.

    model.init_from    a folder or a name on the hub, in Hugging Face format, of a family in
                       protocol/run/families.py; it says the family, unless the user's text does
    data.tokenizer     follows the checkpoint, unless the user's text names one

With another tokenizer the embeddings stand for other words, and only a high loss shows it. So a
tokenizer that gives any of the checkpoint's tokens another number is refused.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from protocol.errors import InvalidRunSpec
from protocol.names import nearest
from protocol.run.families import FAMILIES
from protocol.run.run_spec import RunSpec

from .corpus.chats import PLAIN, template_fault, template_of
from .corpus.tokenizer import (
    BYTES,
    TOKENIZER_FILE,
    ByteTokenizer,
    FileTokenizer,
    model_file,
    tokenizer_file,
)

HIGHEST_USUAL_RATE: Final = 1e-4
"""A learning rate above it is one for training from nothing."""

Vocabulary = Mapping[str, int]
"""Tokens, as they are spelt, to their numbers."""


def with_checkpoint(written: RunSpec) -> RunSpec:
    """The run spec as it is founded: with the checkpoint's family and tokenizer, if none is named.

    Raises InvalidRunSpec where checkpoint or tokenizer cannot be used, or do not fit.
    """
    source, named = written.model.init_from, written.data.tokenizer
    if source is None:
        _vocabulary_of(named)
        return written
    family, rows = _family_and_rows(source)
    if "family" in written.model.model_fields_set and written.model.family != family:
        raise InvalidRunSpec(
            f"model.family = '{written.model.family}', and model.init_from = '{source}' is a"
            f" {family!r} model: leave model.family out, which takes the checkpoint's"
        )
    found = _its_tokenizer(source)
    if "tokenizer" in written.data.model_fields_set:
        vocabulary = _vocabulary_of(named)
        if found is not None:
            _check_same(written, vocabulary, found)
    elif found is not None:
        vocabulary = found
        named = BYTES if found == _vocabulary_of(BYTES) else source  # as our own exports spell it
    else:
        raise InvalidRunSpec(
            f"model.init_from: {source} has no {TOKENIZER_FILE}: name the tokenizer that it was"
            " trained with in data.tokenizer"
        )
    if rows <= (largest := max(vocabulary.values())):
        raise InvalidRunSpec(
            f"model.init_from: {source} has {rows:,} embeddings, and the tokenizer {named!r} has"
            f" {largest + 1:,} tokens: they do not belong together"
        )
    data = written.data.model_copy(update={"tokenizer": named})
    model = written.model.model_copy(update={"family": family})
    return written.model_copy(update={"data": data, "model": model})


def with_chat_template(spec: RunSpec) -> RunSpec:
    """The run spec with the tokenizer's chat template, where it needs one and names none.

    Raises InvalidRunSpec: the template cannot be Jinja's, or is too long.
    """
    if not spec.has_conversations:
        return spec
    text = spec.data.chat_template or template_of(spec.data.tokenizer, spec.model.init_from)
    if fault := template_fault(text):
        raise InvalidRunSpec(f"data.chat_template: {fault}")
    return spec.model_copy(update={"data": spec.data.model_copy(update={"chat_template": text})})


def template_hint(spec: RunSpec) -> str | None:
    """A hint at how conversations are written where no template belongs to the tokenizer."""
    if not (spec.data.chat_template or "").endswith(PLAIN):
        return None
    return (
        f"{spec.data.tokenizer!r} has no chat template: conversations are written plainly, as"
        " <|user|>, a new line and the words; data.chat_template takes another one"
    )


def rate_hint(spec: RunSpec) -> str | None:
    """A warning where a checkpoint is trained at a rate for training from nothing."""
    rate = spec.optimizer.learning_rate
    goes_on = spec.data.replay is not None  # with much text, at a rate by its parent's
    if spec.model.init_from is None or goes_on or rate <= HIGHEST_USUAL_RATE:
        return None
    return (
        f"model.init_from with optimizer.learning_rate = {rate:g}: that is a rate for training from"
        " nothing, and may undo what the checkpoint knows; 2e-05 with warmup_steps = 100 is usual"
        " (with Muon four times as much for it)"
    )


def _family_and_rows(source: str) -> tuple[str, int]:
    """A checkpoint's family, and the rows of its embedding. Raises InvalidRunSpec: it has none."""
    try:
        config: Any = json.loads(model_file(source, "config.json"))
        family, rows = config.get("model_type"), int(config.get("vocab_size", 0))
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise InvalidRunSpec(f"model.init_from: {error}") from error
    if family not in FAMILIES:
        raise InvalidRunSpec(
            f"model.init_from: {source} is a {family!r} model, and these families are supported:"
            f" {', '.join(FAMILIES)}{nearest(str(family), FAMILIES)}"
        )
    if config.get("quantization_config") is not None:
        raise InvalidRunSpec(
            f"model.init_from: {source} is quantised, and training takes whole weights: give the"
            " checkpoint that it was made of, in fp32, fp16 or bf16"
        )
    return family, rows


def _its_tokenizer(source: str) -> Vocabulary | None:
    """The checkpoint's own; None where it has none. Raises InvalidRunSpec: it cannot be used."""
    try:
        data = model_file(source, TOKENIZER_FILE)
    except (ValueError, OSError):
        return None
    try:
        return FileTokenizer(data).vocabulary
    except ValueError as error:
        raise InvalidRunSpec(f"model.init_from: {source}/{TOKENIZER_FILE}: {error}") from error


def _vocabulary_of(tokenizer: str) -> Vocabulary:
    try:
        data = ByteTokenizer().to_json() if tokenizer == BYTES else tokenizer_file(tokenizer)
        return FileTokenizer(data).vocabulary
    except (ValueError, OSError) as error:
        raise InvalidRunSpec(f"data.tokenizer: {str(error).removeprefix('tokenizer: ')}") from error


def _check_same(spec: RunSpec, vocabulary: Vocabulary, found: Vocabulary) -> None:
    if all(vocabulary.get(word) == number for word, number in found.items()):
        return
    raise InvalidRunSpec(
        f"data.tokenizer = {spec.data.tokenizer!r} ({len(vocabulary):,} tokens) is not the"
        f" tokenizer of model.init_from = {spec.model.init_from!r} ({len(found):,} tokens), so its"
        " embeddings would stand for other words: leave data.tokenizer out, which takes the"
        " checkpoint's"
    )
