"""Running out of memory: found in the dry run, told apart in training."""

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from existing import existing
from msgspec.structs import replace

from peer.runtime.child_frames import PipeError
from peer.training import model as model_module
from peer.training.child import tasks
from peer.training.corpus.packed import InvalidCorpus
from peer.training.device import choose_device, choose_precision, is_out_of_memory
from peer.training.messages import Begin, Failed, Ready, TrainerSettings
from peer.training.model import FlatModel, empty_module, initial_module
from peer.training.optimizer import inner_optimizer
from peer.training.pipe import SocketChannel
from peer.training.ports import NonFinite
from peer.training.ranks.group import ALONE, Ranks
from peer.training.step import Stepper, cpu_micro_batch, fit_micro_batch, starting_micro_batch
from protocol.run.run_spec import RunSpec

SETTINGS = TrainerSettings(b"", "me", "corpus", 256)
READY = Ready(device="cuda", precision="fp32", micro_batch=1, steps_per_s=1.0)
BLOCKS_BT = np.zeros((16, 3), np.int64)


class FakeChannel(SocketChannel):
    """Gives one task, and keeps what is told."""

    def __init__(self, task=None):
        self.events: list[Any] = []
        self._task = task

    def emit(self, event):
        self.events.append(event)

    def next_task(self):
        name, descriptors = existing(self._task)
        return Begin(name, SETTINGS, len(descriptors)), descriptors


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "out_of_memory"),
        (torch.AcceleratorError("CUDA error: out of memory"), "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "out_of_memory"),
        (NonFinite("loss is nan"), "non_finite"),
        (torch.AcceleratorError("CUDA error: busy"), "error"),
        (RuntimeError("shape"), None),
        (InvalidCorpus("cut off"), None),
    ],
)
@pytest.mark.parametrize("when", ["build", "train"])
def test_failures_are_told_apart(monkeypatch, capsys, error, reason, when):
    class Loop:
        def run(self):
            raise error

    def build(*_):
        if when == "build":
            raise error
        return Loop(), READY

    channel = FakeChannel()
    assert tasks.train(channel, build) == 1
    failed = channel.events[-1]
    assert isinstance(failed, Failed)
    assert failed.reason == (reason or {"build": "unusable", "train": "error"}[when])
    assert str(error) in failed.detail
    assert channel.events[:-1] == ([] if when == "build" else [READY])


def test_a_full_disk_is_told_as_what_it_is():
    spec = RunSpec.model_validate({"model": {"hidden_size": 16, "num_layers": 1, "num_heads": 2}})
    settings = replace(SETTINGS, spec=spec.to_bytes())
    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        pytest.raises(OSError, match="No space left on device"),
    ):
        tasks.create(FakeChannel(), settings, full.fileno())


def test_a_model_that_cannot_be_made_is_told(monkeypatch, capsys):
    def create(*_):
        raise OSError("no such checkpoint")

    monkeypatch.setattr(tasks, "create", create)
    channel = FakeChannel(("create", (3,)))
    assert tasks.serve(channel) == 1
    assert channel.events == [Failed("unusable", "no such checkpoint")]


def test_more_devices_than_a_step_has_sequences_are_refused(capsys):
    spec = RunSpec.model_validate({"training": {"batch_size": 2}})
    settings = replace(SETTINGS, spec=spec.to_bytes(), devices=("cuda:0", "cuda:1", "cuda:2"))
    channel = FakeChannel()
    assert tasks.train(channel, lambda: tasks.build(settings, -1, -1, channel)) == 1
    (failed,) = channel.events
    assert (failed.reason, failed.detail[:34]) == ("unusable", "a step has 2 sequences (training.b")


def test_weights_that_cannot_be_shared_out_are_refused_where_that_is_asked_for(capsys):
    """A mixture, which the checkpoint that a run begins from may turn out to be."""
    mixture = {"family": "mixtral", "experts": 2, "experts_per_token": 1}
    spec = RunSpec.model_validate({"model": mixture})
    told = replace(SETTINGS, spec=spec.to_bytes(), devices=("cpu",) * 2, shard_weights=True)
    channel = FakeChannel()
    assert tasks.train(channel, lambda: tasks.build(told, -1, -1, channel)) == 1
    (failed,) = channel.events
    assert failed.reason == "unusable"
    assert failed.detail.startswith("--shard-weights: adapters and mixtures of experts need all")


TINY = RunSpec.model_validate({"model": {"hidden_size": 16, "num_layers": 1, "num_heads": 2}})


def tiny_model(**options):
    return FlatModel(initial_module(TINY, 256), torch.device("cpu"), **options)


class FullDevice(Stepper):
    """A stepper on a device that holds two sequences, or fewer beside moments.

    It holds four times as many whose layers are computed again.
    """

    def __init__(self, micro_batch, room=2.0, beside_moments=2.0):
        self.micro_batch, self.room, self.beside_moments = micro_batch, room, beside_moments
        self.tried: list[int] = []
        self._model = tiny_model()

    def step(self, blocks_BT, learning_rate):
        self.tried.append(self.micro_batch)
        if self.micro_batch > self.room * (4 if self._model.notes else 1):
            raise torch.OutOfMemoryError("full")
        self.room = self.beside_moments  # the first step has made them
        return type("Result", (), {"loss": 0.0})


def test_the_dry_run_halves_until_it_fits():
    stepper = FullDevice(16)
    fit_micro_batch(stepper, BLOCKS_BT)
    assert stepper.tried == [16, 8, 4, 2, 2]
    stepper = FullDevice(4, room=4, beside_moments=1)
    fit_micro_batch(stepper, BLOCKS_BT)
    assert stepper.tried == [4, 4, 2, 1, 1]
    with pytest.raises(torch.OutOfMemoryError):
        fit_micro_batch(FullDevice(4, room=0), BLOCKS_BT)


def test_layers_are_computed_again_where_not_even_one_sequence_fits():
    stepper = FullDevice(8, room=0.5, beside_moments=0.5)
    fit_micro_batch(stepper, BLOCKS_BT)
    assert stepper.tried == [8, 4, 2, 1, 8, 4, 2, 2]
    (note,) = stepper._model.notes
    assert note.startswith("layers are computed again in the backward pass")


@pytest.mark.parametrize(("device", "room"), [("cuda", 1.0), ("cuda", 2.0), ("cpu", 1.0)])
def test_a_gpu_computes_layers_again_rather_than_train_on_one_sequence_at_a_time(device, room):
    stepper = FullDevice(8, room=room, beside_moments=room)
    stepper._model.device = torch.device(device)
    fit_micro_batch(stepper, BLOCKS_BT)
    rather = device == "cuda" and room == 1
    least = [8, 4, 2, 2] if room == 2 else [8, 4, 2, 1, 1]
    assert stepper.tried == ([8, 4, 2, 8, 4, 4] if rather else least)
    assert stepper._model.recomputes == rather


def test_a_gpu_halves_an_odd_number_of_sequences_no_further_than_it_halves_others():
    stepper = FullDevice(3, room=1.0, beside_moments=1.0)
    stepper._model.device = torch.device("cuda")
    fit_micro_batch(stepper, BLOCKS_BT)
    assert stepper.tried == [3, 2, 3, 3]


@pytest.mark.parametrize(
    ("available", "micro_batch", "recomputes"), [(1 << 40, 8, False), (64e6, 4, True)]
)
def test_a_cpu_is_told_by_the_memory_that_is_free(monkeypatch, available, micro_batch, recomputes):
    """A quarter is ours: 16 MB, where a sequence takes 43 MB, and 3.9 MB computed again."""
    spec = RunSpec.model_validate(
        {"model": {"hidden_size": 16, "num_layers": 24, "num_heads": 2, "context_length": 168}}
    )
    free = psutil.virtual_memory()._replace(available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    settings = replace(SETTINGS, spec=spec.to_bytes(), device="cpu")
    model, stepper, _ = tasks._stepper(settings, ALONE, -1)
    assert (stepper.micro_batch, bool(model.notes)) == (micro_batch, recomputes)


@pytest.mark.parametrize(
    ("available", "shards", "more"),
    [
        (1 << 40, False, {}),
        (1 << 20, True, {}),
        (1 << 20, False, {"model": {"family": "mixtral", "experts": 2, "experts_per_token": 1}}),
    ],
)
def test_ranks_share_out_the_weights_where_these_do_not_fit(monkeypatch, available, shards, more):
    """One of two, which share the memory; what cannot be shared out is tried whole."""
    free = psutil.virtual_memory()._replace(available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    settings = replace(SETTINGS, spec=RunSpec.model_validate(more).to_bytes(), devices=("cpu",) * 2)
    ranks, device = Ranks(1, 2), torch.device("cpu")
    with ranks.apart():
        assert tasks._shards(settings, settings.run_spec(), ranks, device) == shards
    told = replace(settings, shard_weights=True)
    with ranks.apart():
        assert tasks._shards(told, told.run_spec(), ranks, device) == (not more)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiler_that_fails_is_done_without(monkeypatch, tmp_path):
    """A real one: torch's, without the compiler of C++ that it needs on a CPU."""
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor.cpp, "cxx", ("/nowhere/c++",))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = FlatModel(initial_module(TINY, 256), torch.device("cpu"), compile=True)
    compiled._may_forgo = True  # as 'auto' on a GPU
    stepper = Stepper(compiled, inner_optimizer(compiled, TINY.optimizer, "fp32"), "fp32", 4)
    fit_micro_batch(stepper, np.zeros((4, 9), np.int64))
    assert not compiled.is_compiled
    (note,) = compiled.notes
    assert note.startswith("the model is not compiled: it failed: ")
    assert "c++" in note
    strict = FlatModel(initial_module(TINY, 256), torch.device("cpu"), compile=True)
    stepper = Stepper(strict, inner_optimizer(strict, TINY.optimizer, "fp32"), "fp32", 4)
    with pytest.raises(Exception, match="c\\+\\+"):
        fit_micro_batch(stepper, np.zeros((4, 9), np.int64))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_auto_compiles_where_there_are_a_gpu_and_a_compiler(monkeypatch):
    meta = torch.device("meta")
    assert not FlatModel(empty_module(TINY, 256), torch.device("cpu"), compile="auto").is_compiled
    monkeypatch.setattr(model_module, "GPU", "meta")
    assert FlatModel(empty_module(TINY, 256), meta, compile="auto").is_compiled
    for compiler in ("", "/nowhere/cc"):
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.setenv("CC", compiler)
        model = FlatModel(empty_module(TINY, 256), meta, compile="auto")
        assert not model.is_compiled
        (note,) = model.notes
        assert note.endswith("there is no C compiler here: install gcc, or set CC")
    assert FlatModel(empty_module(TINY, 256), meta, compile=True).is_compiled
    assert not FlatModel(empty_module(TINY, 256), meta, compile=False).is_compiled


@pytest.mark.parametrize(
    ("setting", "batch_size", "cap", "expected"),
    [("auto", 8, 0, 8), ("auto", 12, 0, 4), ("auto", 8, 2, 2), (3, 8, 0, 3), (16, 8, 0, 8)],
)
def test_the_search_starts_at_a_power_of_two(setting, batch_size, cap, expected):
    assert starting_micro_batch(setting, batch_size, cap) == expected


def test_a_cpu_keeps_memory_for_others():
    assert cpu_micro_batch(8, lambda size: size) == 8
    assert cpu_micro_batch(8, lambda size: size << 60) == 0


def test_devices_that_are_not_here_are_refused():
    assert choose_device("cpu").type == "cpu"
    for name in ("tpu:7", "mps", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(ValueError, match="device"):
            choose_device(name)
    assert choose_precision("auto", torch.device("cpu")) == "fp32"
    assert choose_precision("bf16", torch.device("cpu")) == "bf16"
    assert not is_out_of_memory(ValueError("can't allocate memory"))


@pytest.mark.parametrize(
    ("built", "count", "sentence"),
    [
        (False, 0, "is built without CUDA; install one with it, or use cpu"),
        (True, 0, "finds no CUDA device; see whether nvidia-smi shows one, or use cpu"),
        (True, 2, "there are 2 CUDA devices; use cuda:0 to cuda:1"),
    ],
)
def test_a_missing_device_is_told_with_what_to_do(monkeypatch, built, count, sentence):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ValueError, match=sentence):
        choose_device("cuda:2" if count else "cuda")


@pytest.mark.parametrize("task", [("dance", ()), ("train", (3,))])
def test_what_is_no_task_ends_the_child(task):
    channel = FakeChannel(task)
    with pytest.raises(PipeError, match=task[0]):
        tasks.serve(channel)
