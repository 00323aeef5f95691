"""Several processes that train one model: as good as one, and ended by the end of any."""

from contextlib import asynccontextmanager
from itertools import product

import numpy as np
import psutil
import pytest
import torch
import trio
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
from protocol.trainer_messages import ONE_CHUNK, FragmentMerged, Merge

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MEMBERS = (("me", 1),)
LIMIT_S = 300
STEPS = 10


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"{i} to be or not to be " * 20)
    spec = RunSpec(data=DataSection(source=f"text:{folder}/*.txt", validation_blocks=4))
    return prepare_corpus(spec, folder / "cache").folder


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2}


def _settings(
    corpus,
    ranks,
    optimizer="adamw",
    batch_size=8,
    moments="fp32",
    sizes=SIZES,
    split=False,
    shards=False,
    **sync,
):
    spec = RunSpec(
        model=ModelSection(**sizes),
        data=DataSection(validation_blocks=4),
        optimizer=OptimizerSection(
            name=optimizer, warmup_steps=0, learning_rate=1e-3, moments=moments
        ),
        training=TrainingSection(batch_size=batch_size),
        sync=SyncSection(inner_steps=STEPS),
    )
    devices = ("cpu",) * ranks if ranks > 1 else ()
    return TrainerSettings(
        spec.to_bytes(),
        "me",
        str(corpus),
        256,
        device="cpu",
        threads=ranks,
        devices=devices,
        split_context=split,
        shard_weights=shards,
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


async def _trained(trainer, round_, position=0):
    await trainer.send(TrainRound(round_, STEPS, MEMBERS, 0, position, 10.0 * round_, 1.0))
    return await _next(trainer, RoundClosed)


async def _life(settings, folder):
    """A round, a merge, a validation, another round: losses, what is kept, what was sent."""
    async with _trainer(settings) as (trainer, slow):
        ready = await _next(trainer, Ready)
        assert ready.ranks == settings.ranks
        assert any("is divided" in note for note in ready.notes) == settings.divide_sequences
        await trainer.send(Load())
        closed = await _trained(trainer, 0)
        first = await _kept(trainer, folder / f"by-{settings.ranks}")
        codes = bytes(trainer.codes(0))
        slow.array[:] *= 0.9
        await trainer.send(Merge(0, 0, ONE_CHUNK, ()))
        await _next(trainer, FragmentMerged)
        await trainer.send(Evaluate(0))
        loss = (await _next(trainer, Evaluated)).loss
        again = await _trained(trainer, 1, closed.position)
        tokens = np.arange(5 * 9, dtype=np.uint32)
        await trainer.send(Evaluate(1, tokens.tobytes(), 5))
        other_loss = (await _next(trainer, Evaluated)).loss
        second = await _kept(trainer, folder / "second")
        return (closed.loss, again.loss, loss, other_loss), first, second, codes


async def _gone_on(settings, path):
    """What is kept after one more round of a trainer that has begun with what others have kept."""
    async with _trainer(settings) as (trainer, _):
        await trainer.send(Load(str(path), 10.0, 0, 0))
        await _trained(trainer, 1)
        return await _kept(trainer, path.with_name("third"))


def _assert_near(one, other, bound=1e-5):
    """As vectors: where a gradient is nearly nothing, AdamW makes noise of it."""
    assert one.keys() == other.keys()
    for name, vector in one.items():
        most = (bound if name == "fast" else 1e-3) * vector.norm()
        assert torch.linalg.vector_norm(vector - other[name]) <= most, name


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "ranks", "batch_size", "shards"),
    [
        ("adamw", 2, 4, False),
        ("muon", 3, 5, False),
        ("adamw", 2, 5, True),
        ("muon", 3, 4, True),
    ],
)
async def test_several_train_as_one(corpus, tmp_path, optimizer, ranks, batch_size, shards):
    """With shares of 2, 2 and 1 sequences too: a mean of their means would be another gradient.

    Also where each has a part of the weights alone.
    """
    settings = [_settings(corpus, n, optimizer, batch_size, shards=shards) for n in (1, ranks)]
    one, several = [await _life(each, tmp_path) for each in settings]
    np.testing.assert_allclose(one[0], several[0], rtol=1e-5)
    _assert_near(one[1], several[1])
    _assert_near(one[2], several[2], 1e-4)
    written = torch.empty(len(several[3]), dtype=torch.uint8)
    get_codec("int8").encode(several[1]["fast"], written)
    assert bytes(written.numpy()) == several[3]
    by_several, by_one = tmp_path / f"by-{ranks}", tmp_path / "by-1"
    swapped = [await _gone_on(*each) for each in zip(settings, (by_several, by_one), strict=True)]
    _assert_near(*swapped)
    assert torch.linalg.vector_norm(swapped[0]["fast"] - several[1]["fast"]) > 0.01


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "optimizer", "ranks", "batch_size"),
    [("llama", "adamw", 2, 4), ("gemma3_text", "muon", 3, 2)],
)
async def test_several_that_divide_sequences_train_as_one(
    corpus, tmp_path, family, optimizer, ranks, batch_size
):
    """With fewer sequences than ranks too; the validation loss is that of whole sequences."""
    sizes = {**SIZES, "family": family, "hidden_size": 36, "num_heads": 6, "num_kv_heads": 2}
    one, several = [
        await _life(_settings(corpus, n, optimizer, batch_size, sizes=sizes, split=True), tmp_path)
        for n in (1, ranks)
    ]
    np.testing.assert_allclose(one[0], several[0], rtol=1e-5)
    _assert_near(one[1], several[1])
    _assert_near(one[2], several[2], 1e-4)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        pytest.param(
            {"num_heads": 4}, "4 heads of attention cannot be divided by 3", marks=pytest.mark.long
        ),
        ({"family": "mixtral", "num_heads": 6, "hidden_size": 36}, "a mixture of experts"),
    ],
)
async def test_what_cannot_be_divided_is_refused(corpus, more, why):
    async with _trainer(_settings(corpus, 3, sizes=SIZES | more, split=True)) as (trainer, _):
        failed = await trainer.receive()
        assert (failed.reason, failed.detail[:17]) == ("unusable", "--split-context: ")
        assert why in failed.detail


@pytest.mark.long
async def test_several_keep_coarse_moments_and_one_takes_them_over(corpus, tmp_path):
    found = []
    for moments in ("fp32", "bf16"):
        async with _trainer(_settings(corpus, 2, "muon", moments=moments)) as (trainer, _):
            await _next(trainer, Ready)
            await trainer.send(Load())
            await _trained(trainer, 0)
            found.append(await _kept(trainer, tmp_path / moments))
    exact, coarse = found
    names = [name for name in coarse if name != "fast"]
    for name in names:
        assert torch.equal(coarse[name], coarse[name].bfloat16().float()), name
        assert 0 < torch.dist(coarse[name], exact[name]) < 0.05 * exact[name].norm(), name
    async with _trainer(_settings(corpus, 1, "muon", moments="bf16")) as (trainer, _):
        await _next(trainer, Ready)
        await trainer.send(Load(str(tmp_path / "bf16")))
        taken = await _kept(trainer, tmp_path / "taken")
    assert all(torch.equal(taken[name], coarse[name]) for name in ("fast", *names))


@asynccontextmanager
async def _nothing_stays(trainer):
    """When the block ends, the trainer and all that it started are gone, within a bound."""
    rank_0 = psutil.Process(trainer.process_id)
    while not (followers := [each for each in rank_0.children() if _follows(each, rank_0)]):
        await trio.sleep(0.05)
    all_ranks = [rank_0, *followers]
    yield all_ranks
    while any(map(_runs, all_ranks)):
        await trio.sleep(0.05)


def _follows(process, rank_0):
    """What torch starts as it is imported, and ends at once, has another command, or none yet."""
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return "peer.training.child" in command and command != rank_0.cmdline()


def _runs(process):
    """A zombie that nobody has collected yet is gone."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("phase", "shards"),
    [
        ("importing", False),
        *(
            pytest.param(phase, shards, marks=pytest.mark.long)
            for phase, shards in [("idle", False), *product(["training", "keeping"], [False, True])]
        ),
    ],
)
async def test_the_end_of_any_rank_is_the_trainers(corpus, tmp_path, phase, shards):
    settings = _settings(corpus, 2, shards=shards)
    async with _trainer(settings) as (trainer, _), _nothing_stays(trainer) as ranks:
        if phase != "importing":
            await _next(trainer, Ready)
            await trainer.send(Load())
        if phase in ("training", "keeping"):
            await trainer.send(TrainRound(0, 1000, MEMBERS, 0, 0, 0.0, 1.0))
            await _next(trainer, TrainerProgress)
        if phase == "keeping":
            await trainer.send(Keep(str(tmp_path / "kept")))
        ranks[1].kill()
        with pytest.raises(TrainerDied, match=r"rank 1 of 2 was killed by signal 9"):
            while True:
                assert not isinstance(event := await trainer.receive(), Failed), event


@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.long), True])
async def test_no_rank_outlives_the_first(corpus, stopped):
    """Not even one that is stopped, and reads nothing."""
    async with _trainer(_settings(corpus, 2)) as (trainer, _), _nothing_stays(trainer) as ranks:
        await _next(trainer, Ready)
        await trainer.send(Load())
        await trainer.send(TrainRound(0, 1000, MEMBERS, 0, 0, 0.0, 1.0))
        await _next(trainer, TrainerProgress)
        if stopped:
            ranks[1].suspend()
        ranks[0].kill()


@pytest.mark.long
async def test_out_of_memory_in_one_is_told_as_that(corpus):
    """Its address space is bounded in the middle of a run."""
    async with _trainer(_settings(corpus, 2)) as (trainer, _), _nothing_stays(trainer) as ranks:
        await _next(trainer, Ready)
        await trainer.send(Load())
        await trainer.send(TrainRound(0, 1000, MEMBERS, 0, 0, 0.0, 1.0))
        await _next(trainer, TrainerProgress)
        now = ranks[1].memory_info().vms
        ranks[1].rlimit(psutil.RLIMIT_AS, (now // 2, now // 2))
        while not isinstance(event := await trainer.receive(), Failed):
            pass
        assert (event.reason, event.detail[:11]) == ("out_of_memory", "rank 1 of 2")
