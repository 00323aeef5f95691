"""Several processes that train one model: as good as one, and ended by the end of any."""

import os
import signal
from contextlib import asynccontextmanager

import blake3
import numpy as np
import psutil
import pytest
import torch
import trio
from msgspec.structs import replace
from safetensors.torch import load_file

from peer.codec import get_codec
from peer.training.child_process import SpareChild
from peer.training.corpus.folder import prepare_corpus
from peer.training.messages import (
    Evaluate,
    Evaluated,
    Failed,
    Keep,
    Kept,
    Load,
    Ready,
    RoundClosed,
    TrainerProgress,
    TrainerSettings,
    TrainRound,
)
from peer.training.model import FlatModel, initial_module
from peer.training.ports import TrainerDied
from peer.training.process import trainer_starter
from peer.training.shared import SharedVector
from protocol.run.run_spec import DataSection, ModelSection, RunSpec, SyncSection, TrainingSection
from protocol.run.sections import OptimizerSection
from protocol.trainer_messages import ONE_CHUNK, FragmentMerged, FragmentSent, Merge

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MEMBERS = (("me", 1),)
LIMIT_S = 120
STEPS = 10


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"{i} to be or not to be " * 20)
    spec = RunSpec(data=DataSection(source=f"text:{folder}/*.txt", validation_blocks=4))
    return prepare_corpus(spec, folder / "cache").folder


def _settings(corpus, ranks, optimizer="adamw", batch_size=8, **sync):
    spec = RunSpec(
        model=ModelSection(
            hidden_size=64, intermediate_size=96, num_layers=3, num_heads=2
        ),
        data=DataSection(validation_blocks=4),
        optimizer=OptimizerSection(name=optimizer, warmup_steps=0, learning_rate=1e-3),
        training=TrainingSection(batch_size=batch_size),
        sync=SyncSection(inner_steps=STEPS, **sync),
    )
    devices = ("cpu",) * ranks if ranks > 1 else ()
    return TrainerSettings(
        spec.to_bytes(), "me", str(corpus), 256, device="cpu", threads=ranks, devices=devices
    )


@asynccontextmanager
async def _trainer(settings):
    spec = settings.run_spec()
    model = FlatModel(initial_module(spec, 256), torch.device("cpu"))
    with SharedVector(model.theta_P.numel()) as slow, trio.fail_after(LIMIT_S):
        slow.array[:] = model.theta_P.numpy()
        start = trainer_starter(settings, slow, SpareChild(settings.threads))
        async with start(slow.array, None) as trainer:
            yield trainer, slow


async def _next(trainer, kind):
    while not isinstance(event := await trainer.receive(), kind):
        assert not isinstance(event, Failed), event
    return event


async def _kept(trainer, path):
    await trainer.send(Keep(str(path)))
    assert (await _next(trainer, Kept)).error is None
    return load_file(path)


async def _life(settings, folder):
    """A round, a merge, half of the next; what is kept after each, and what was sent."""
    async with _trainer(settings) as (trainer, slow):
        ready = await _next(trainer, Ready)
        assert ready.ranks == settings.ranks
        await trainer.send(Load())
        await trainer.send(TrainRound(0, STEPS, MEMBERS, 0, 0, 0.0, 1.0))
        sent = await _next(trainer, FragmentSent)
        closed = await _next(trainer, RoundClosed)
        first = await _kept(trainer, folder / f"first-{settings.ranks}")
        codes = bytes(trainer.codes(0))
        assert blake3.blake3(codes).hexdigest(length=16) == sent.digest
        slow.array[:] *= 0.9
        await trainer.send(Merge(0, 0, ONE_CHUNK, ()))
        await _next(trainer, FragmentMerged)
        await trainer.send(TrainRound(1, STEPS, MEMBERS, 0, closed.position, 10.0, 1.0))
        again = await _next(trainer, RoundClosed)
        await trainer.send(Evaluate(1))
        loss = (await _next(trainer, Evaluated)).loss
        second = await _kept(trainer, folder / f"second-{settings.ranks}")
        return (closed.loss, again.loss, loss), first, second, codes


def _assert_near(one, other):
    """As vectors: where a gradient is nearly nothing, AdamW makes noise of it."""
    assert one.keys() == other.keys()
    for name, vector in one.items():
        assert torch.linalg.vector_norm(vector - other[name]) <= 1e-5 * vector.norm(), name


@pytest.mark.parametrize(
    ("optimizer", "ranks", "batch_size"), [("adamw", 2, 4), ("muon", 3, 5)]
)
async def test_several_train_as_one(corpus, tmp_path, optimizer, ranks, batch_size):
    """With shares of 2, 2 and 1 sequences too: a mean of their means would be another gradient."""
    settings = [_settings(corpus, n, optimizer, batch_size) for n in (1, ranks)]
    one, several = [await _life(each, tmp_path) for each in settings]
    np.testing.assert_allclose(one[0], several[0], rtol=1e-5)
    _assert_near(one[1], several[1])
    _assert_near(one[2], several[2])
    written = torch.empty(len(several[3]), dtype=torch.uint8)
    get_codec("int8").encode(several[1]["fast"], written)
    assert bytes(written.numpy()) == several[3]
