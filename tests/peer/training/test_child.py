"""Running out of memory: found in the dry run, told apart in training."""

from typing import Any

import numpy as np
import pytest
import torch

from peer.training import calibrate, child
from peer.training.channel import Task
from peer.training.device import choose_device, choose_precision, is_out_of_memory
from peer.training.errors import NonFinite
from peer.training.messages import Failed
from peer.training.pipe import PipeError


class FakeChannel:
    def __init__(self):
        self.events = []

    def emit(self, event):
        self.events.append(event)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "out_of_memory"),
        (NonFinite("loss is nan"), "non_finite"),
        (RuntimeError("shape"), "error"),
    ],
)
def test_failures_are_told_apart(monkeypatch, capsys, error, reason):
    settings: Any = None

    def build(*_):
        raise error

    monkeypatch.setattr(child, "build", build)
    channel: Any = FakeChannel()
    assert child.train(channel, settings, 0, 0) == 1
    (failed,) = channel.events
    assert isinstance(failed, Failed)
    assert failed.reason == reason
    assert str(error) in failed.detail


BLOCKS = np.zeros((1, 2), np.int64)


class FullDevice:
    """A stepper on a device that holds two sequences."""

    def __init__(self, micro_batch, room=2):
        self.micro_batch, self.room, self.tried = micro_batch, room, []

    def step(self, blocks_BT, learning_rate):
        self.tried.append(self.micro_batch)
        if self.micro_batch > self.room:
            raise torch.OutOfMemoryError("full")
        return type("Result", (), {"loss": 0.0})


def test_the_dry_run_halves_until_it_fits():
    stepper: Any = FullDevice(16)
    too_small: Any = FullDevice(4, room=0)
    calibrate.fit_micro_batch(stepper, BLOCKS)
    assert stepper.tried == [16, 8, 4, 2]
    with pytest.raises(torch.OutOfMemoryError):
        calibrate.fit_micro_batch(too_small, BLOCKS)


@pytest.mark.parametrize(
    ("setting", "batch_size", "cap", "expected"),
    [("auto", 8, 0, 8), ("auto", 12, 0, 4), ("auto", 8, 2, 2), (3, 8, 0, 3), (16, 8, 0, 8)],
)
def test_the_search_starts_at_a_power_of_two(setting, batch_size, cap, expected):
    assert calibrate.starting_micro_batch(setting, batch_size, cap) == expected


def test_a_cpu_keeps_memory_for_others():
    assert calibrate.cpu_micro_batch(8, 1) == 8
    assert calibrate.cpu_micro_batch(8, 1 << 60) == 1


def test_devices_that_are_not_here_are_refused():
    assert choose_device("cpu").type == "cpu"
    for name in ("tpu:7", "mps", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(ValueError, match="device"):
            choose_device(name)
    assert choose_precision("auto", torch.device("cpu")) == "fp32"
    assert choose_precision("bf16", torch.device("cpu")) == "bf16"
    assert not is_out_of_memory(ValueError("can't allocate memory"))


@pytest.mark.parametrize(("name", "descriptors"), [("dance", ()), ("train", (3,))])
def test_what_is_no_task_ends_the_child(name, descriptors):
    channel: Any = FakeChannel()
    settings: Any = None
    task = Task(name, settings, descriptors)
    channel.next_task = lambda: task
    with pytest.raises(PipeError, match=task.name):
        child.serve(channel)
