"""The trainer as a real child process: it works, and every way to die is told apart."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager

import blake3
import numpy as np
import psutil
import pytest
import torch
import trio
from msgspec.structs import replace

from peer.runtime.child_frames import encode
from peer.training.child.tasks import NICENESS_ON_CPU
from peer.training.child_process import SpareChild, spare_child
from peer.training.corpus.folder import prepare_corpus
from peer.training.messages import (
    Begin,
    Evaluate,
    Evaluated,
    Failed,
    Load,
    Ready,
    RoundClosed,
    Stop,
    TrainerSettings,
    TrainRound,
)
from peer.training.model import FlatModel, initial_module, model_shapes
from peer.training.ports import TrainerDied
from peer.training.process import ProcessTrainer, create_model, trainer_starter
from peer.training.shared import SharedVector
from protocol.run.layout import Layout
from protocol.run.run_spec import (
    DataSection,
    FrozenSection,
    ModelSection,
    RunSpec,
    SyncSection,
    TrainingSection,
)
from protocol.run.sections import OptimizerSection
from protocol.trainer_messages import (
    ONE_CHUNK,
    FragmentMerged,
    FragmentSent,
    Merge,
    Tried,
    Try,
    Yield,
    Yielded,
)

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MEMBERS = (("me", 1),)
LIMIT_S = 120


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(30):
        (folder / f"{i}.txt").write_text("to be or not to be " * 20)
    spec = RunSpec(data=DataSection(source=f"text:{folder}/*.txt", validation_blocks=4))
    return prepare_corpus(spec, folder / "cache").folder


def _settings(
    corpus, hidden_size=16, learning_rate=1e-2, method="noloco", optimizer="adamw", **model
):
    spec = RunSpec(
        model=ModelSection(
            hidden_size=hidden_size, intermediate_size=32, num_layers=1, num_heads=2, **model
        ),
        data=DataSection(validation_blocks=4),
        optimizer=OptimizerSection(name=optimizer, warmup_steps=0, learning_rate=learning_rate),
        training=TrainingSection(batch_size=2),
        sync=SyncSection(inner_steps=10, method=method),
    )
    return TrainerSettings(spec.to_bytes(), "me", str(corpus), 256, device="cpu", threads=1)


@asynccontextmanager
async def _trainer(settings):
    spec = settings.run_spec()
    model = FlatModel(initial_module(spec, 256), torch.device("cpu"))
    with SharedVector(model.theta_P.numel()) as slow, trio.fail_after(LIMIT_S):
        slow.array[:] = model.theta_P.numpy()
        async with trainer_starter(settings, slow, SpareChild(settings.threads))(
            slow.array, None
        ) as trainer:
            ready = await trainer.receive()
            assert isinstance(ready, Ready)
            assert ready.layout.digest == model.layout.digest
            yield trainer, slow


async def _next(trainer, kind):
    while not isinstance(event := await trainer.receive(), kind):
        assert not isinstance(event, Failed), event
    return event


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.long)])
async def test_it_learns_and_says_why_it_refuses(corpus, optimizer):
    async with _trainer(_settings(corpus, optimizer=optimizer)) as (trainer, slow):
        await trainer.send(Load())
        await trainer.send(Evaluate(0))
        before = (await _next(trainer, Evaluated)).loss
        await trainer.send(TrainRound(0, 30, MEMBERS, 0, 0, 0.0, 1.0))
        sent = await _next(trainer, FragmentSent)
        codes = trainer.codes(0)
        assert blake3.blake3(codes).hexdigest(length=16) == sent.digest
        scales = np.frombuffer(codes[slow.array.size :], "<u2").astype("<u4") << 16
        values = np.frombuffer(codes[: slow.array.size], "i1").reshape(-1, 128)
        slow.array[:] = (values * scales.view("<f4")[:, None]).ravel()
        await trainer.send(Try(0, 0, 2))
        told = await _next(trainer, Tried)
        assert told.gain == pytest.approx(0.0, abs=0.05)  # nobody has pulled
        assert told.seconds > 0
        await trainer.send(Merge(0, 0, ONE_CHUNK, ()))
        merged = await _next(trainer, FragmentMerged)
        assert merged.waited_s > 0
        await trainer.send(Evaluate(0))
        assert (await _next(trainer, Evaluated)).loss < before - 0.5
        await trainer.send(Merge(0, 0, ONE_CHUNK, ()))
        failed = await trainer.receive()
        assert isinstance(failed, Failed)
        assert (failed.reason, "in_flight=False" in failed.detail) == ("error", True)
        with pytest.raises(TrainerDied, match="exited with 1"):
            await trainer.receive()


async def test_who_sends_to_one_that_ended_and_was_closed_is_told_that_it_is_gone(corpus):
    async with _trainer(_settings(corpus)) as (trainer, _):
        await trainer.send(Stop())
        with pytest.raises(TrainerDied, match="exited with 0"):
            while True:
                await trainer.receive()
    with pytest.raises(TrainerDied, match="exited with 0"):
        await trainer.send(Load())


async def _stopped_in_mid_write(trainer, region, before):
    """Whether the child now stands still in the middle of writing over these codes."""
    codes = trainer.codes(region)
    while codes[:4096] == before[:4096]:
        await trio.lowlevel.checkpoint()
    os.kill(trainer.process_id, signal.SIGSTOP)
    os.waitid(os.P_PID, trainer.process_id, os.WSTOPPED)  # noqa: ASYNC222 - it stops at once
    if codes[-4096:] == before[-4096:]:  # scales come last
        return True
    os.kill(trainer.process_id, signal.SIGCONT)
    return False


async def _kill(trainer):
    os.kill(trainer.process_id, signal.SIGKILL)
    with pytest.raises(TrainerDied, match="signal 9, as the system does where memory runs out"):
        while True:
            assert not isinstance(await trainer.receive(), (RoundClosed, FragmentSent))


async def test_kill_in_mid_write_harms_nothing(corpus):
    async with _trainer(_settings(corpus, hidden_size=1024)) as (trainer, slow):
        await trainer.send(Load())
        before = slow.array.copy()
        for round_ in range(100):
            codes = bytes(trainer.codes(0))
            await trainer.send(TrainRound(round_, 1, MEMBERS, 0, 0, 0.0, 1.0))
            if round_ and await _stopped_in_mid_write(trainer, 0, codes):
                break
            await _next(trainer, RoundClosed)
            await trainer.send(Merge(0, round_, ONE_CHUNK, ()))
            await _next(trainer, FragmentMerged)
        await _kill(trainer)
    assert np.array_equal(slow.array, before)


async def test_fragments_come_and_go(corpus):
    async with _trainer(_settings(corpus, method="diloco")) as (trainer, slow):
        await trainer.send(Load())
        await trainer.send(Yield(1))
        await _next(trainer, Yielded)
        slow.array[:] *= 1.01
        await trainer.send(Merge(1, None, (), (0,), ()))
        for round_ in range(2):
            await trainer.send(TrainRound(round_, 10, MEMBERS, 0, 20 * round_, 0.0, 1.0))
        sent, merged, closed = [], [], None
        while closed is None or closed.round == 0:
            event = await trainer.receive()
            if isinstance(event, FragmentSent):
                codes = trainer.codes(event.fragment)
                assert blake3.blake3(codes).hexdigest(length=16) == event.digest
                sent.append((event.fragment, event.cycle, event.steps))
                await trainer.send(Merge(event.fragment, event.cycle, (0,), ()))
            elif isinstance(event, FragmentMerged):
                merged.append((event.fragment, event.cycle))
            elif isinstance(event, RoundClosed):
                closed = event
        assert sent == [(1, 0, 5), (0, 1, 10), (1, 1, 10), (0, 2, 10)]
        assert merged == [(1, 0), (0, 1), (1, 1)]
        assert closed.steps == 10
        sizes = [len(trainer.codes(fragment)) for fragment in range(2)]
        assert sum(sizes) == slow.array.size * 130 // 128


async def test_kill_while_a_fragment_is_written_is_no_send(corpus):
    settings = _settings(corpus, hidden_size=1024, method="diloco")
    async with _trainer(settings) as (trainer, _):
        await trainer.send(Load())
        for round_ in range(100):
            codes = bytes(trainer.codes(1))
            await trainer.send(TrainRound(round_, 2, MEMBERS, 0, 0, 0.0, 1.0))
            if round_ and await _stopped_in_mid_write(trainer, 1, codes):
                break
            while not isinstance(event := await trainer.receive(), RoundClosed):
                if isinstance(event, FragmentSent):
                    await trainer.send(Merge(event.fragment, event.cycle, (), ()))
        await _kill(trainer)


async def test_weights_that_are_not_numbers_are_reported(corpus):
    async with _trainer(_settings(corpus)) as (trainer, slow):
        slow.array[:] = np.nan
        await trainer.send(Load())
        await trainer.send(TrainRound(0, 5, MEMBERS, 0, 0, 0.0, 1.0))
        failed = await trainer.receive()
        assert isinstance(failed, Failed)
        assert failed.reason == "non_finite"


async def test_a_child_that_cannot_start_says_why(corpus, tmp_path):
    with SharedVector(128) as slow, trio.fail_after(LIMIT_S):
        settings = _settings(tmp_path / "no-corpus")
        async with trainer_starter(settings, slow, SpareChild(settings.threads))(
            slow.array, None
        ) as trainer:
            failed = await trainer.receive()
            assert isinstance(failed, Failed)
            assert failed.reason == "unusable"
            assert "no-corpus" in failed.detail
            with pytest.raises(TrainerDied, match="no-corpus"):
                await trainer.receive()


@pytest.mark.parametrize("when", ["importing", "waiting"])
def test_it_ends_when_the_daemon_is_gone(corpus, when, tmp_path):
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "peer.training.child", str(theirs.fileno())]
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    with ours:
        if when == "waiting":
            order = encode(Begin("create", _settings(corpus), 1))
            with (tmp_path / "weights").open("wb") as weights:
                socket.send_fds(ours, [order], [weights.fileno()])
            ours.settimeout(LIMIT_S)
            assert ours.recv(4)
    assert child.wait(LIMIT_S) == 0


async def test_initial_weights_follow_from_the_seed_and_whoever_made_them_can_train(
    corpus, tmp_path
):
    settings = _settings(corpus)
    spec = settings.run_spec()
    other = replace(settings, spec=spec.model_copy(update={"seed": 1}).to_bytes())
    expected = FlatModel(initial_module(spec, 256), torch.device("cpu"))
    async with spare_child(threads=1) as spare:
        created = await create_model(settings, tmp_path / "first", spare)
        layout = created.layout
        await create_model(other, tmp_path / "second", spare)
        process_id = (child := await spare.take()).process.pid
        spare.put_back(child)
        with SharedVector(layout.padded_parameters) as slow, trio.fail_after(LIMIT_S):
            slow.array[:] = np.fromfile(tmp_path / "first", "<f4")
            async with trainer_starter(settings, slow, spare)(slow.array, None) as trainer:
                assert (await _next(trainer, Ready)).layout.digest == layout.digest
                assert isinstance(trainer, ProcessTrainer)
                assert trainer.process_id == process_id
                await trainer.send(Load())
                await trainer.send(TrainRound(0, 5, MEMBERS, 0, 0, 0.0, 1.0))
                await _next(trainer, RoundClosed)
                niceness = psutil.Process(process_id).nice() - psutil.Process().nice()
                assert niceness == NICENESS_ON_CPU
    first = np.fromfile(tmp_path / "first", "<f4")
    assert np.array_equal(first, expected.theta_P.numpy())
    assert not np.array_equal(first, np.fromfile(tmp_path / "second", "<f4"))
    assert layout == expected.layout
    frozen = FrozenSection(
        config=created.config,
        layout_digest=layout.digest,
        parameters=layout.parameters,
        padded_parameters=layout.padded_parameters,
    )
    joiner = spec.model_copy(update={"frozen": frozen, "model": ModelSection(hidden_size=8)})
    assert Layout.from_shapes(model_shapes(joiner, 256)) == layout


async def test_a_spare_child_that_died_is_replaced_and_one_that_nobody_took_is_ended():
    async with spare_child(threads=1) as spare:
        first = await spare.take()
        spare.put_back(first)
        first.kill()
        await first.process.wait()
        second = await spare.take()
        assert second.process.pid != first.process.pid
        spare.put_back(second)
    assert second.process.returncode == -signal.SIGKILL


async def test_only_the_shared_weights_will_do(corpus):
    with SharedVector(128) as slow, pytest.raises(ValueError, match="shared"):
        async with trainer_starter(_settings(corpus), slow, SpareChild(1))(
            np.zeros(128, "f4"), None
        ):
            pass
