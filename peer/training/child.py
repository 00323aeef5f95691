"""What runs in the child process: build the parts, say `Ready`, run the loop, say how it ended."""

import itertools
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from peer.codec import get_codec
from protocol.errors import LocoError
from protocol.run.run_spec import RunSpec

from . import calibrate
from .channel import SocketChannel
from .corpus import Corpus, open_corpus
from .device import choose_device, choose_precision, is_of_device, is_out_of_memory
from .errors import NonFinite
from .loop import InnerLoop, TrainerParts
from .messages import Failed, Ready
from .model import FlatModel, empty_module, initial_module
from .optimizer import FlatAdamW
from .pipe import ModelCreated, PipeError
from .settings import TrainerSettings
from .shared import CodeRegions, map_vector
from .step import Stepper
from .sync import trainer_side

MAX_DETAIL_CHARS: Final = 2000
"""Length at which what is said of a failure is cut."""


def serve(channel: SocketChannel) -> int:
    """Do what the daemon wants, until it wants a trainer: that is the last. The exit status."""
    while True:
        task = channel.next_task()
        match task.name, task.descriptors:
            case "create", (weights_fd,):
                try:
                    create(channel, task.settings, weights_fd)
                except Exception as error:  # noqa: BLE001 - whatever it is, the daemon should read it
                    return _failed(channel, error, unknown="unusable")
                os.close(weights_fd)
            case "train", (slow_fd, codes_fd):
                return train(channel, task.settings, slow_fd, codes_fd)
            case _:
                raise PipeError(f"{task.name} with {len(task.descriptors)} descriptors")


def train(channel: SocketChannel, settings: TrainerSettings, slow_fd: int, codes_fd: int) -> int:
    """Be a trainer until `Stop`. Returns the exit status."""
    try:
        parts, ready = build(settings, slow_fd, codes_fd)
    except Exception as error:  # noqa: BLE001 - whatever it is, the daemon should read it
        return _failed(channel, error, unknown="unusable")
    try:
        channel.emit(ready)
        InnerLoop(parts, channel).run()
    except Exception as error:  # noqa: BLE001 - as above
        return _failed(channel, error, unknown="error")
    return 0


def _failed(channel: SocketChannel, error: Exception, *, unknown: str) -> int:
    """Say why it ends. Returns the exit status.

    Args:
        unknown: the reason of an error that has none of its own.
    """
    if isinstance(error, NonFinite):
        channel.emit(Failed("non_finite", str(error)))
        return 1
    traceback.print_exc()
    reason = "error" if is_of_device(error) else unknown
    if is_out_of_memory(error):
        reason = "out_of_memory"
    told = isinstance(error, (LocoError, ValueError, OSError))  # their messages are for people
    detail = str(error) if told else f"{type(error).__name__}: {error}"
    channel.emit(Failed(reason, detail[:MAX_DETAIL_CHARS]))
    return 1


def create(channel: SocketChannel, settings: TrainerSettings, weights_fd: int) -> None:
    """Write the founder's initial weights to a file, and say what the model looks like."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the bits of an initialisation must not depend on the machine's cores
    module = initial_module(settings.run_spec(), settings.vocabulary_size)
    torch.set_num_threads(threads)
    config = module.config.to_json_string(use_diff=True)
    model = FlatModel(module, torch.device("cpu"))
    shapes = tuple((entry.name, entry.shape) for entry in model.layout.entries)
    with open(weights_fd, "wb", closefd=False) as file:
        model.theta_P.numpy().tofile(file)
    channel.emit(ModelCreated(shapes, config))


def build(settings: TrainerSettings, slow_fd: int, codes_fd: int) -> tuple[TrainerParts, Ready]:
    """Model, optimizer and corpus; with the micro-batch found and the speed measured."""
    spec = settings.run_spec()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(spec.seed)
    device = choose_device(settings.device)
    precision = choose_precision(spec.training.precision, device)
    # `Load` brings the weights.
    module = empty_module(spec, settings.vocabulary_size)
    model = FlatModel(module, device, compile=spec.training.compile)
    optimizer = FlatAdamW(model, spec.optimizer)
    corpus = open_corpus(
        Path(settings.corpus_path), spec.model.context_length, spec.data.validation_blocks
    )
    stepper = Stepper(model, optimizer, precision, _first_micro_batch(settings, spec, device))
    blocks = _sample_blocks(corpus, spec.training.batch_size)
    calibrate.fit_micro_batch(stepper, blocks())
    steps_per_s = calibrate.measure_steps_per_s(stepper, blocks)
    calibrate.forget(model, optimizer)
    slow_P = _read_only_tensor(map_vector(slow_fd))
    if slow_P.numel() != model.layout.padded_parameters:
        raise ValueError(
            f"slow weights of {slow_P.numel()} values for {model.layout.padded_parameters}"
        )
    regions = CodeRegions.create_in(codes_fd, trainer_side(spec).regions_of(spec, model.layout))
    codec = get_codec(spec.sync.codec, part_of=model.layout.padded_parameters)
    snapshots = trainer_side(spec).snapshots_of(spec, model, slow_P, regions)
    parts = TrainerParts(
        spec,
        settings.peer_id,
        corpus,
        model,
        optimizer,
        stepper,
        snapshots,
        slow_P,
        settings.overlap_steps,
    )
    ready = Ready(
        parameters=model.layout.parameters,
        padded_parameters=model.layout.padded_parameters,
        layout_digest=model.layout.digest,
        device=str(device),
        precision=precision,
        micro_batch=stepper.micro_batch,
        steps_per_s=steps_per_s,
        shapes=tuple((entry.name, entry.shape) for entry in model.layout.entries),
        loops=codec.loops_for(model.layout.padded_parameters, device),
    )
    return parts, ready


def _first_micro_batch(settings: TrainerSettings, spec: RunSpec, device: torch.device) -> int:
    start = calibrate.starting_micro_batch(
        spec.training.micro_batch, spec.training.batch_size, settings.micro_batch_cap
    )
    if device.type != "cpu" or spec.training.micro_batch != "auto":
        return start
    model = spec.model
    return calibrate.cpu_micro_batch(
        start,
        calibrate.sequence_bytes(
            model.context_length, model.hidden_size, model.num_layers, settings.vocabulary_size
        ),
    )


def _sample_blocks(corpus: Corpus, batch_size: int) -> Callable[[], npt.NDArray[np.int64]]:
    """A function that gives the corpus's batches in order, again and again."""
    counter = itertools.count(0, batch_size)
    offsets = np.arange(batch_size, dtype=np.int64)
    return lambda: corpus.blocks((next(counter) + offsets) % corpus.num_blocks)


def _read_only_tensor(vector: npt.NDArray[np.float32]) -> torch.Tensor:
    with warnings.catch_warnings():
        # torch has no read-only tensors; the mapping itself is, so a write would end the process,
        # not harm the daemon.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(vector)
