"""Fine-tuning as people do it: a checkpoint with its tokenizer, conversations, and a model to ask.

The whole model first; then adapters of what came of that, which two peers train and average.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from swarm import START_S, Swarm, open_swarm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers import trainers as tokenizer_trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    pipeline,
)

from peer.observe.event_names import EventName
from peer.options.exit_codes import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHORT = {
    "model.context_length": "48",
    "data.validation_blocks": "4",
    "training.batch_size": "4",
    "optimizer.warmup_steps": "2",
    "sync.inner_steps": "10",
}


def chats(path: Path, answer: str | None) -> str:
    path.mkdir()
    turns = [] if answer is None else [{"role": "assistant", "content": answer}]
    lines = (
        json.dumps({"messages": [{"role": "user", "content": f"Is it {number}?"}, *turns]})
        for number in range(800)
    )
    (path / "a.jsonl").write_text("\n".join(lines))
    return f"chat:{path}/*.jsonl"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizer_trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Is it so? user assistant Yes. No."] * 9, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def own(tmp_path: Path):
    with open_swarm(tmp_path) as opened:
        yield opened


def new(own: Swarm, folder: Path, preset: str, model: Path, data: str, **changes: str) -> Path:
    """As `new` writes it, and people shorten it."""
    path = folder / f"{preset}.toml"
    options = ("--preset", preset, "--model", str(model), "--data", data)
    done = own.loco("new", str(path), *options, timeout_s=START_S)
    assert done.returncode == ExitCode.OK, done.stderr
    text = path.read_text()
    for key, value in (SHORT | {key.replace("__", "."): v for key, v in changes.items()}).items():
        text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
        assert count == 1, key
    path.write_text(text)
    return path


def answer_of(folder: Path) -> str:
    ask = pipeline("text-generation", model=str(folder))
    (said,) = ask([{"role": "user", "content": "Is it 7?"}], max_new_tokens=12, do_sample=False)
    *_, last = said["generated_text"]
    assert last["role"] == "assistant"
    return str(last["content"])


@pytest.mark.long
def test_a_checkpoint_is_tuned_whole_and_then_by_adapters(
    own: Swarm, checkpoint: Path, tmp_path: Path
) -> None:
    whole, adapted = tmp_path / "whole", tmp_path / "adapted"
    rates = {"optimizer__learning_rate": "1e-2", "training__total_steps": "60"}
    sft = new(own, tmp_path, "sft", checkpoint, chats(tmp_path / "yes", "Yes."), **rates)
    done = ("--exit-when-done", "--export-when-done", str(whole))
    alone = own.launch("alone", "start", str(sft), *done)
    assert alone.wait_exit(2 * START_S) == ExitCode.OK
    assert answer_of(whole) == "Yes."
    tuned = AutoModelForCausalLM.from_pretrained(whole).state_dict()

    rates["training__total_steps"] = "100000"
    lora = new(own, tmp_path, "lora", whole, chats(tmp_path / "no", "No."), **rates)
    founder = own.launch("founder", "start", str(lora))
    founder.wait_event(EventName.ROUND_OPENED, START_S, round=1)
    joiner = own.join(founder)
    joiner.wait_averaging(times=5, timeout_s=2 * START_S)
    home = ("--home", str(joiner.home.root))
    exported = own.loco("export", "--hf", str(adapted), *home, timeout_s=START_S)
    assert exported.returncode == ExitCode.OK, exported.stderr
    assert answer_of(adapted) == "No."
    merged = AutoModelForCausalLM.from_pretrained(adapted).state_dict()
    moved = {name for name in tuned if not torch.equal(tuned[name], merged[name])}
    assert moved == {name for name in tuned if name.endswith("_proj.weight")}
    assert json.loads((adapted / "adapter" / "adapter_config.json").read_text())["r"] == 16


def test_a_set_without_answers_ends_the_start(own: Swarm, checkpoint: Path, tmp_path: Path) -> None:
    spec = new(own, tmp_path, "sft", checkpoint, chats(tmp_path / "none", None))
    peer = own.launch("alone", "start", str(spec))
    assert peer.wait_exit(START_S) == ExitCode.USAGE
    assert "a.jsonl, line 1: column 'messages' is not a list of messages" in peer.stderr
