"""What a run spec may say of training, as a founder does it with a real child: create, train.

Checkpoints, compilation, bf16 and the presets; each with as little model as shows that it works.
"""

import math
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import trio
from preset_files import preset_toml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from peer.cli.new import METHODS, PRESETS
from peer.training.child_process import SpareChild, spare_child
from peer.training.corpus.folder import prepare_corpus
from peer.training.messages import (
    Evaluate,
    Evaluated,
    Failed,
    Load,
    Ready,
    RoundClosed,
    TrainerSettings,
    TrainRound,
)
from peer.training.model import FlatModel, model_shapes
from peer.training.ports import Trainer, TrainerDied
from peer.training.process import create_model, trainer_starter
from peer.training.shared import SharedVector
from protocol.run.layout import Layout
from protocol.run.needs import WHOLE_LOGITS_VOCABULARY
from protocol.run.run_spec import FrozenSection, RunSpec, parse_toml
from protocol.trainer_messages import FragmentSent, Merge

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

LIMIT_S = 300
"""A compiler may be at work, on a busy machine."""
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 2}
SENTENCE = "to be or not to be, that is the question that was to be asked. "
VOCABULARY = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts, and a tokenizer of them."""
    folder = tmp_path_factory.mktemp("founding")
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"{number}: " + SENTENCE * 200)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SENTENCE], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def spec_of(folder, **sections):
    tree = {
        "data": {"source": f"text:{folder}/*.txt", "validation_blocks": 4},
        "model": SIZES,
        "optimizer": {"warmup_steps": 0, "learning_rate": 1e-2},
        "training": {"batch_size": 2},
        "sync": {"inner_steps": 10},
    }
    return RunSpec.model_validate(tree | sections)


@dataclass
class Founded:
    """A trainer that has said `Ready`, and the model that it was given."""

    spec: RunSpec
    layout: Layout
    ready: Ready
    trainer: Trainer
    weights: npt.NDArray[Any]
    vocabulary: int

    async def next(self, kind):
        while not isinstance(event := await self.trainer.receive(), kind):
            assert not isinstance(event, Failed), event
            if isinstance(event, FragmentSent):
                await self.trainer.send(Merge(event.fragment, event.cycle, (), ()))
        return event

    async def loss(self):
        """Of the first weights, on the blocks kept for validation."""
        await self.trainer.send(Evaluate(0))
        return (await self.next(Evaluated)).loss

    async def train(self, num_steps):
        await self.trainer.send(TrainRound(0, num_steps, (("me", 1),), 0, 0, 0.0, 1.0))
        return await self.next(RoundClosed)


@asynccontextmanager
async def founded(spec, folder, cache):
    corpus = prepare_corpus(spec, cache)
    vocabulary = corpus.manifest.vocabulary_size
    settings = TrainerSettings(
        spec.to_bytes(), "me", str(corpus.folder), vocabulary, device="cpu", threads=1
    )
    with trio.fail_after(LIMIT_S):
        async with spare_child(threads=1) as spare:
            created = await create_model(settings, cache / "weights", spare)
        layout = created.whole
        frozen = FrozenSection(
            config=created.config,
            layout_digest=layout.digest,
            parameters=layout.parameters,
            padded_parameters=layout.padded_parameters,
        )
        adapter = spec.adapter and spec.adapter.model_copy(update={"base": created.base})
        spec = spec.model_copy(update={"frozen": frozen, "adapter": adapter})
        settings = TrainerSettings(
            spec.to_bytes(), "me", str(corpus.folder), vocabulary, device="cpu", threads=1
        )
        with SharedVector(layout.padded_parameters) as slow:
            slow.array[:] = weights = np.fromfile(cache / "weights", "<f4")
            async with trainer_starter(settings, slow, SpareChild(settings.threads))(
                slow.array, None
            ) as trainer:
                ready = await trainer.receive()
                assert isinstance(ready, Ready), ready
                assert ready.layout.digest == layout.digest
                await trainer.send(Load())
                yield Founded(spec, layout, ready, trainer, weights, vocabulary)


# --- from a checkpoint ----------------------------------------------------------------------------
def checkpoint(folder, family="llama", **changes):
    torch.manual_seed(3)
    sizes = {
        "head_dim": 6,
        "vocab_size": 260,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(family, **(sizes | changes))
    module = AutoModelForCausalLM.from_config(config)
    module.save_pretrained(folder)
    return module


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.long) for f in ("qwen3", "mixtral"))]
)
async def test_a_run_goes_on_from_a_checkpoint_with_its_sizes(folder, tmp_path, family):
    expected = FlatModel(checkpoint(tmp_path / "hf", family), torch.device("cpu"))
    spec = spec_of(folder, model={"init_from": str(tmp_path / "hf"), "context_length": 32})
    async with founded(spec, folder, tmp_path) as run:
        assert run.layout == expected.layout
        np.testing.assert_array_equal(run.weights, expected.theta_P.numpy())
        assert run.ready.layout.parameters == expected.layout.parameters
        before = await run.loss()
        assert (await run.train(30)).loss < before - 0.5
        # Who joins has no checkpoint: the frozen config says it all.
        gone = run.spec.model_copy(
            update={"model": run.spec.model.model_copy(update={"init_from": "/nowhere"})}
        )
        assert Layout.from_shapes(model_shapes(gone, 256)) == run.layout


async def test_a_checkpoint_that_is_not_there_is_refused(folder, tmp_path):
    spec = spec_of(folder, model={"init_from": str(tmp_path / "nowhere")})
    with pytest.raises(TrainerDied, match="nowhere"):
        async with founded(spec, folder, tmp_path):
            pass


# --- adapters -------------------------------------------------------------------------------------
def adapted_spec(folder, source, **adapter):
    model = {"init_from": str(source), "context_length": 32}
    return spec_of(folder, model=model, adapter={"rank": 4, **adapter})


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
async def test_adapters_alone_are_trained_and_the_checkpoint_stays(folder, tmp_path, precision):
    source = tmp_path / "hf"
    whole = FlatModel(checkpoint(source), torch.device("cpu")).layout
    training = {"batch_size": 2, "precision": precision}
    spec = adapted_spec(folder, source).model_copy(
        update={"training": spec_of(folder, training=training).training}
    )
    async with founded(spec, folder, tmp_path) as run:
        assert all(".lora_" in entry.name for entry in run.layout.entries)
        assert run.layout.parameters < whole.parameters / 2
        before = await run.loss()
        closed = await run.train(30)
        assert closed.loss < before - 0.1
        assert run.ready.precision == precision


@pytest.mark.long
async def test_with_the_first_matrix_frozen_half_is_trained(folder, tmp_path):
    checkpoint(tmp_path / "hf")
    spec = adapted_spec(folder, tmp_path / "hf", trains="b", targets=["q_proj"])
    async with founded(spec, folder, tmp_path) as run:
        names = [entry.name for entry in run.layout.entries]
        assert len(names) == 3
        assert all("q_proj.lora_B" in name for name in names)


@pytest.mark.long
async def test_adapters_of_a_checkpoint_with_a_head_of_many_tokens(folder, tmp_path):
    checkpoint(tmp_path / "hf", vocab_size=WHOLE_LOGITS_VOCABULARY + 1)
    spec = adapted_spec(folder, tmp_path / "hf", targets=["q_proj"])
    async with founded(spec, folder, tmp_path) as run:
        before = await run.loss()
        assert (await run.train(10)).loss < before


@pytest.mark.long
async def test_another_checkpoint_at_the_place_of_the_runs_is_refused(folder, tmp_path):
    checkpoint(tmp_path / "hf")
    spec = adapted_spec(folder, tmp_path / "hf")
    with pytest.raises(TrainerDied, match="here has other weights than the run's adapters"):
        async with founded(
            spec.model_copy(update={"adapter": spec.adapter.model_copy(update={"base": "0" * 32})}),
            folder,
            tmp_path,
        ):
            pass


@pytest.mark.long
async def test_layers_that_are_not_there_are_named(folder, tmp_path):
    checkpoint(tmp_path / "hf")
    spec = adapted_spec(folder, tmp_path / "hf", targets=["q_proj", "c_attn"])
    with pytest.raises(TrainerDied, match="no layers c_attn, but down_proj, gate_proj, k_proj"):
        async with founded(spec, folder, tmp_path):
            pass


# --- how steps are computed -----------------------------------------------------------------------
@pytest.mark.long
async def test_bf16_trains_in_bf16_where_it_was_asked_for(folder, tmp_path):
    spec = spec_of(folder, training={"batch_size": 2, "precision": "bf16"})
    async with founded(spec, folder, tmp_path) as run:
        assert run.ready.precision == "bf16"
        before = await run.loss()
        assert (await run.train(30)).loss < before - 0.5


@pytest.mark.long
async def test_a_compiled_model_trains(folder, tmp_path):
    spec = spec_of(folder, training={"batch_size": 2, "compile": True})
    async with founded(spec, folder, tmp_path) as run:
        before = await run.loss()
        assert (await run.train(30)).loss < before - 0.5


# --- presets --------------------------------------------------------------------------------------
CUTS = {"125m": {"hidden_size": 48}, "1b": {"hidden_size": 64}}
"""As many heads as the preset has, so narrow ones."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "method"),
    list(zip(cycle(CUTS), METHODS, strict=False)),
)
async def test_a_large_preset_trains_when_it_is_cut_to_size(folder, tmp_path, preset, method):
    tree = parse_toml(preset_toml(preset, method)).model_dump()
    tree["model"] |= {"num_layers": 2, "intermediate_size": 96, **CUTS[preset]}
    tree["data"] |= {
        "source": f"text:{folder}/*.txt",
        "tokenizer": str(folder / "tokenizer.json"),
        "validation_blocks": 2,
    }
    tree["training"] |= {"batch_size": 2}
    async with founded(RunSpec.model_validate(tree), folder, tmp_path) as run:
        closed = await run.train(4)
        assert closed.steps == 4
        assert closed.tokens == 4 * 2 * tree["model"]["context_length"]
        # It has not begun to learn yet: the presets warm up for a thousand steps.
        assert closed.loss == pytest.approx(math.log(run.vocabulary), abs=0.3)
        assert set(PRESETS) == {"demo", *CUTS}
