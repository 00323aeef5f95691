"""Conversations: written by a chat template, and learnt in the assistant's words alone."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from peer.training.corpus.blocks import Corpus, cut_piece, piece_path
from peer.training.corpus.chats import PLAIN, ChatTemplate, template_of
from peer.training.corpus.folder import adopt_held_out, adopt_manifest, prepare_corpus
from peer.training.corpus.packed import InvalidCorpus
from peer.training.init_from import template_hint, with_chat_template
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import inner_optimizer
from peer.training.step import Stepper
from protocol.errors import InvalidRunSpec
from protocol.run.run_spec import RunSpec, parse_toml

pytestmark = pytest.mark.slow
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6"},
    {"role": "user", "content": "Thanks."},
]
CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETS = (
    "{% for m in messages %}{{ m.role[0] }}"
    "{% if loop.last and m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)

FIRST = (
    "<s><|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def chats(folder: Path, conversations: list[object], column: str = "messages") -> str:
    folder.mkdir(exist_ok=True)
    lines = (json.dumps({column: each}) for each in conversations)
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    return f"chat:{folder}/*.jsonl"


def many(count: int = 120) -> list[object]:
    return [
        [
            {"role": "user", "content": f"What is {number} + 1?"},
            {"role": "assistant", "content": f"It is {number + 1}."},
        ]
        for number in range(count)
    ]


def spec_of(source: str) -> RunSpec:
    return parse_toml(
        f"""
        model = {{ context_length = 16, hidden_size = 32, intermediate_size = 64, num_layers = 1 }}
        data = {{ source = "{source}", validation_blocks = 4, piece_kib = 16 }}
        training = {{ batch_size = 4 }}
        """
    )


def text_of(tokens: np.ndarray) -> tuple[str, str]:
    """All that is read, and the targets."""
    given = tokens < 0
    read = np.where(given, ~tokens, tokens)
    return bytes(read.astype(np.uint8)).decode(), bytes(tokens[~given].astype(np.uint8)).decode()


def test_the_assistants_words_are_learnt_and_end_as_the_template_ends_them():
    template = ChatTemplate('{%- set bos_token = "<s>" -%}' + CHATML)
    assert template.passages(CHAT) == [
        (FIRST, True),
        ("4<|im_end|>\n", False),
        ("<|im_start|>user\nAnd 3 + 3?<|im_end|>\n<|im_start|>assistant\n", True),
        ("6<|im_end|>\n", False),
    ]


def test_where_earlier_answers_are_written_otherwise_each_is_learnt_after_what_it_follows():
    assert ChatTemplate(FORGETS).passages(CHAT) == [
        ("sua", True),
        ("4", False),
        ("suaua", True),
        ("6", False),
    ]


def test_a_corpus_of_chats_masks_all_but_answers_whole_and_in_pieces(tmp_path):
    spec = spec_of(chats(tmp_path / "set", many()))
    kept = prepare_corpus(spec, tmp_path / "cache")
    whole = kept.open()
    assert isinstance(whole, Corpus)
    every = np.arange(kept.manifest.num_blocks)
    rows = whole.blocks(every)
    read, learnt = text_of(np.concatenate([rows[:, :-1].reshape(-1)]))
    assert "<|user|>\nWhat is 5 + 1?\0\n<|assistant|>\nIt is 6.\0\n" in read
    assert "It is 6.\0\nIt is 7.\0\n" in learnt
    assert "What" not in learnt

    manifest, held_out = (kept.folder / "manifest").read_bytes(), kept.held_out.read_bytes()
    pieces = adopt_manifest(manifest, kept.manifest_digest, tmp_path / "joiner")
    adopt_held_out(pieces, held_out)
    for piece in range(kept.manifest.num_pieces):
        data = cut_piece(whole.train, kept.manifest, piece)
        assert kept.manifest.is_piece(piece, data)
        piece_path(pieces.folder, piece).write_bytes(data)
    assert (pieces.open().blocks(every) == rows).all()
    assert (pieces.open().validation_blocks(4) == whole.validation_blocks(4)).all()
    assert (whole.validation_blocks(4) < 0).any()


def test_held_out_blocks_without_an_answer_are_refused(tmp_path):
    long = [{"role": "user", "content": "?" * 3000}, {"role": "assistant", "content": "!"}]
    spec = spec_of(chats(tmp_path / "set", [long] * 120))
    first = spec.model_copy(update={"data": spec.data.model_copy(update={"validation_blocks": 1})})
    with pytest.raises(InvalidCorpus, match="no answer is in the 1 blocks of 16 tokens that are"):
        prepare_corpus(first, tmp_path / "cache")


def test_tokens_made_of_chats_elsewhere_keep_their_marks(tmp_path):
    spec = spec_of(chats(tmp_path / "set", many()))
    kept = prepare_corpus(spec, tmp_path / "cache")
    again = prepare_corpus(spec, tmp_path / "other", f"tokens:{kept.whole}")
    assert again.manifest_digest == kept.manifest_digest


def test_data_sets_with_messages_are_read_as_files_are(tmp_path):
    source = chats(tmp_path / "set", many())
    first = prepare_corpus(spec_of(source), tmp_path / "cache").manifest
    table = pa.Table.from_pylist([{"talk": each} for each in many()])
    pq.write_table(table, tmp_path / "a.parquet")
    other = prepare_corpus(
        spec_of(f"chat:parquet:{tmp_path}/a.parquet#talk"), tmp_path / "cache"
    ).manifest
    assert other.num_tokens + other.held_out_blocks > 0.9 * first.num_tokens
    streamed = prepare_corpus(spec_of(f"chat:hf:{tmp_path / 'set'}"), tmp_path / "cache")
    assert streamed.manifest.vocabulary_size == first.vocabulary_size


def stepper_of(spec: RunSpec, micro_batch: int) -> tuple[FlatModel, Stepper]:
    model = FlatModel(initial_module(spec, 256), torch.device("cpu"))
    return model, Stepper(
        model, inner_optimizer(model, spec.optimizer, "fp32"), "fp32", micro_batch
    )


def test_the_loss_is_that_of_the_targets_whatever_the_micro_batch(tmp_path):
    spec = spec_of(chats(tmp_path / "set", many()))
    blocks_BT = np.random.default_rng(0).integers(0, 256, (4, 17))
    masked_BT = blocks_BT.copy()
    masked_BT[0] = ~masked_BT[0]  # a block without any target
    masked_BT[1, :9] = ~masked_BT[1, :9]
    model, one = stepper_of(spec, 1)
    logits = model._module(torch.from_numpy(blocks_BT[:, :-1])).logits.detach()
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(blocks_BT[:, 1:]).flatten(), reduction="none"
    ).view(4, 16)
    expected = each[torch.from_numpy(masked_BT[:, 1:] >= 0)].mean()
    results = []
    for micro_batch in (1, 2, 4):
        model, stepper = stepper_of(spec, micro_batch)
        assert stepper.loss_of(masked_BT) == pytest.approx(float(expected), rel=1e-5)
        results.append(stepper.step(masked_BT, 1e-3).settled())
    assert results[0] == pytest.approx(results[2], rel=1e-4)
    assert results[1] == pytest.approx(results[2], rel=1e-4)
    assert one.step(~blocks_BT, 0.0).settled() == (0.0, 0.0)


# --- templates ------------------------------------------------------------------------------------
def tokenizer_folder(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_tokenizers_template_brings_its_special_tokens(tmp_path):
    told = {"bos_token": {"content": "<s>"}, "chat_template": CHATML}
    folder = tokenizer_folder(tmp_path / "one", **told)
    assert ChatTemplate(template_of(str(folder))).passages(CHAT)[0][0].startswith("<s><|im_start|>")
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": CHATML}]
    folder = tokenizer_folder(tmp_path / "two", chat_template=named)
    assert template_of(str(folder)) == CHATML
    (folder / "chat_template.jinja").write_text("newer" + CHATML)
    assert template_of("bytes", str(folder)).startswith("newer")


def test_without_a_template_a_plain_one_is_taken_and_told():
    spec = with_chat_template(spec_of("chat:x"))
    assert spec.data.chat_template == '{%- set eos_token = "\\u0000" -%}' + PLAIN
    assert "'bytes' has no chat template" in (template_hint(spec) or "")
    assert with_chat_template(spec_of("text:x")) == spec_of("text:x")
    assert b"chat_template" not in spec_of("text:x").to_bytes()


@pytest.mark.parametrize("template", ["{% for", "no turns", "{{ raise_exception('no') }}"])
def test_a_template_that_writes_no_conversation_is_refused(template):
    spec = spec_of("chat:x")
    data = spec.data.model_copy(update={"chat_template": template})
    with pytest.raises(InvalidRunSpec, match=r"data\.chat_template: a question and its answer "):
        with_chat_template(spec.model_copy(update={"data": data}))


# --- bad input ------------------------------------------------------------------------------------
NO_ANSWER = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("conversation", "said"),
    [
        (NO_ANSWER, "is not a list of messages.*one at least of the role 'assistant'"),
        ("a text", "is not a list of messages"),
        ([{"from": "human", "value": "?"}], "is not a list of messages"),
    ],
)
def test_what_is_no_conversation_is_told_with_its_line(tmp_path, conversation, said):
    source = chats(tmp_path / "set", [*many(3), conversation])
    with pytest.raises(InvalidCorpus, match=rf"a\.jsonl, line 4: column 'messages' {said}"):
        prepare_corpus(spec_of(source), tmp_path / "cache")


def test_lines_of_another_kind_are_told(tmp_path):
    source = chats(tmp_path / "set", many(3), column="conversations")
    with pytest.raises(InvalidCorpus, match="line 1: no JSON object with a column 'messages'"):
        prepare_corpus(spec_of(source), tmp_path / "cache")
    prepare_corpus(spec_of(chats(tmp_path / "b", many(), "talk") + "#talk"), tmp_path / "cache")


def test_stages_learn_whole_texts():
    with pytest.raises(InvalidRunSpec, match=r"data\.source: stages learn whole texts"):
        parse_toml('data.source = "chat:x"\npipeline.stages = 2\nsync.inner_steps = 10')
