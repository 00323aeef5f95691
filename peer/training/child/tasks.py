"""The tasks of the child process: build the loop, say `Ready`, run it, say how it ended."""

import json
import os
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import nn

from peer.runtime.child_frames import MAX_FAILURE_CHARS, PipeError
from peer.training import step
from peer.training.child.followers import die_with_rank_0, start_followers
from peer.training.corpus.folder import open_corpus
from peer.training.device import (
    Precision,
    choose_device,
    choose_precision,
    free_memory,
    is_out_of_memory,
)
from peer.training.loop import InnerLoop, inner_loop
from peer.training.messages import Failed, ModelCreated, Ready, TrainerSettings
from peer.training.model import (
    FlatModel,
    adapted_checkpoint,
    config_of,
    empty_module,
    initial_module,
    layout_of,
    model_config,
    model_shapes,
)
from peer.training.optimizer import inner_optimizer, rank_spans
from peer.training.pipe import SocketChannel
from peer.training.ports import Interrupted, NonFinite
from peer.training.ranks.context import SplitContext
from peer.training.ranks.group import ALONE, RankOrder, Ranks
from peer.training.recomputed import recompute_layers
from peer.training.sharded import ShardedModel, weights_nowhere
from peer.training.shared import code_memory
from protocol.errors import LocoError
from protocol.run.families import division_fault
from protocol.run.needs import sharding_fault, shards, step_memory
from protocol.run.run_spec import RunSpec

NICENESS_ON_CPU: Final = 10
"""Added to the priority of a trainer that computes on the CPU: it would take all cores, and daemons
that answer late keep other machines waiting. Where a GPU computes, the trainer hardly uses them."""


def serve(channel: SocketChannel) -> int:
    """Do what the daemon wants; a trainer is the last task. Returns the exit status."""
    all_threads = torch.get_num_threads()
    while True:
        begin, descriptors = channel.next_task()
        settings = begin.settings
        torch.set_num_threads(max(1, (settings.threads or all_threads) // settings.ranks))
        match begin.task, descriptors:
            case "create", (weights_fd,):
                try:
                    create(channel, settings, weights_fd)
                except Exception as error:  # noqa: BLE001 - whatever it is, the daemon should read it
                    return _failed(channel, error, unknown="unusable")
                os.close(weights_fd)
            case "train", (slow_fd, codes_fd):
                return train(channel, partial(build, settings, slow_fd, codes_fd, channel))
            case "train", (slow_fd, codes_fd, ring_fd):
                from peer.training.stages.build import build_stage

                memory = slow_fd, codes_fd
                return train(channel, partial(build_stage, settings, memory, ring_fd, channel))
            case "follow", (store_fd, weights_fd):
                os._exit(
                    follow(channel, settings, store_fd, weights_fd)
                )  # threads of collectives may hang
            case _:
                raise PipeError(f"{begin.task} with {len(descriptors)} descriptors")


def train(channel: SocketChannel, build_loop: Callable[[], tuple[InnerLoop, Ready]]) -> int:
    """Be a trainer until `Stop`. Returns the exit status."""
    try:
        loop, ready = build_loop()
    except Exception as error:  # noqa: BLE001 - whatever it is, the daemon should read it
        return _failed(channel, error, unknown="unusable")
    try:
        channel.emit(ready)
        if ready.device == "cpu":
            os.nice(NICENESS_ON_CPU)
        loop.run()
    except Interrupted:
        return 0
    except Exception as error:  # noqa: BLE001 - as above
        return _failed(channel, error, unknown="error")
    return 0


def _failed(channel: SocketChannel, error: Exception, *, unknown: str) -> int:
    """Say why it ends; `unknown` is the reason of an error that has none of its own."""
    if isinstance(error, NonFinite):
        channel.emit(Failed("non_finite", str(error)))
        return 1
    traceback.print_exc()
    # Where the device itself failed it may work the next time.
    reason = "error" if isinstance(error, torch.AcceleratorError) else unknown
    if is_out_of_memory(error):
        reason = "out_of_memory"
    told = isinstance(error, (LocoError, ValueError, OSError))  # their messages are for people
    detail = str(error) if told else f"{type(error).__name__}: {error}"
    channel.emit(Failed(reason, detail[:MAX_FAILURE_CHARS]))
    return 1


def create(channel: SocketChannel, settings: TrainerSettings, weights_fd: int) -> None:
    """Write the initial weights of the model, or of a stage, to a file; tell its shapes."""
    spec, stage = settings.run_spec(), settings.stage
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the bits of an initialisation must not depend on the machine's cores
    module: nn.Module
    if stage is None:
        module = initial_module(spec, settings.vocabulary_size)
    else:
        from peer.training.stages.module import initial_stage

        config = model_config(spec, settings.vocabulary_size)
        module = initial_stage(config, spec.seed, stage, spec.pipeline.stages)
    torch.set_num_threads(threads)
    text = json.dumps(config_of(spec, settings.vocabulary_size))
    base = None
    if spec.adapter is not None:
        from peer.training.adapter import base_digest

        base = base_digest(module)  # before the head is taken off
    model = FlatModel(module, torch.device("cpu"))
    shapes = tuple((entry.name, entry.shape) for entry in model.layout.entries)
    whole = shapes
    if stage is not None:
        whole = tuple(sorted(model_shapes(spec, settings.vocabulary_size).items()))
    with open(weights_fd, "wb", closefd=False) as file:
        file.write(model.theta_P.numpy().data)  # tofile does not say that a disk is full
    channel.emit(ModelCreated(shapes, whole, text, base))


def build(
    settings: TrainerSettings, slow_fd: int, codes_fd: int, channel: SocketChannel
) -> tuple[InnerLoop, Ready]:
    """The loop of a whole model; with the micro-batch found and the speed measured."""
    spec = settings.run_spec()
    ranks, batch, weights_fd = ALONE, spec.training.batch_size, -1
    if settings.divide_sequences:
        config = json.dumps(config_of(spec, settings.vocabulary_size))
        if why := division_fault(config, settings.ranks):
            raise ValueError(f"--split-context: {why}")
    elif settings.ranks > batch:
        raise ValueError(
            f"a step has {batch} sequences (training.batch_size), fewer than the {settings.ranks}"
            f" GPUs here; give --gpus {batch}"
        )
    if settings.shard_weights and (why := sharding_fault(spec)):
        raise ValueError(f"--shard-weights: {why}")
    if settings.ranks > 1:
        store_fd, weights_fd = code_memory(), code_memory()
        start_followers(settings, (store_fd, weights_fd), channel.emit)
        ranks = _join(settings, store_fd)
    model, stepper, precision = _stepper(settings, ranks, weights_fd)
    corpus = open_corpus(
        Path(settings.corpus_path), spec.model.context_length, spec.data.validation_blocks
    )
    held_out = corpus.validation_blocks(spec.data.validation_blocks)
    blocks_BT = held_out[np.arange(spec.training.batch_size) % len(held_out)]
    step.fit_micro_batch(stepper, blocks_BT)
    steps_per_s = step.measure_steps_per_s(stepper, blocks_BT)
    loop = inner_loop(settings, (slow_fd, codes_fd), corpus, model, stepper, channel)
    ready = loop.ready(precision, stepper.micro_batch, steps_per_s, measures=True)
    return loop, replace(ready, ranks=ranks.count, compiled=model.is_compiled)


def follow(
    channel: SocketChannel, settings: TrainerSettings, store_fd: int, weights_fd: int
) -> int:
    """Be a rank beside rank 0, until that ends. Returns the exit status."""
    die_with_rank_0()
    spec, unknown = settings.run_spec(), "unusable"
    try:
        ranks = _join(settings, store_fd)
        model, stepper, _ = _stepper(settings, ranks, weights_fd)
        shape = spec.training.batch_size, spec.model.context_length + 1
        step.fit_micro_batch(stepper, np.zeros(shape, np.int64))
        if model.device.type == "cpu":
            os.nice(NICENESS_ON_CPU)
        unknown = "error"
        while True:
            obey(*ranks.next_order(), model, stepper)
    except Exception as error:  # noqa: BLE001 - whatever it is, the daemon should read it
        return _failed(channel, error, unknown=unknown)


def obey(order: RankOrder, numbers: list[float], model: FlatModel, stepper: step.Stepper) -> None:
    """Do what rank 0 does."""

    def told_of() -> npt.NDArray[np.int64]:
        sequences, tokens, moved, *_ = map(int, numbers)
        model.moved = bool(moved)
        return np.zeros((sequences, tokens), np.int64)  # rank 0 fills it

    match order:
        case RankOrder.STEP:
            stepper.step(told_of(), numbers[3])
        case RankOrder.LOSS:
            stepper.loss_of(told_of())
        case RankOrder.LOG_PROBS:
            stepper.log_probs_of(told_of())
        case RankOrder.GIVE_WEIGHTS:
            assert isinstance(model, ShardedModel)
            model.give_weights()
        case RankOrder.FORGET:
            stepper.optimizer.reset()
        case RankOrder.GIVE_MOMENTS:
            stepper.optimizer.moments()
        case RankOrder.TAKE_MOMENTS:
            stepper.optimizer.take_over(int(numbers[0]), lambda *_: None)


def _join(settings: TrainerSettings, store_fd: int) -> Ranks:
    device = choose_device(settings.own_device)
    divide = settings.divide_sequences
    return Ranks.join(settings.rank, settings.ranks, device, store_fd, divide_sequences=divide)


def _stepper(
    settings: TrainerSettings, ranks: Ranks, weights_fd: int
) -> tuple[FlatModel, step.Stepper, Precision]:
    spec = settings.run_spec()
    torch.manual_seed(spec.seed)
    device = choose_device(settings.own_device)
    precision = choose_precision(spec.training.precision, device)
    if _shards(settings, spec, ranks, device):
        model: FlatModel = _sharded_model(settings, ranks, device, weights_fd)
    else:
        model = _flat_model(settings, ranks, device, precision)
    optimizer = inner_optimizer(model, spec.optimizer, precision, ranks)
    micro_batch = _first_micro_batch(settings, spec, model)
    return model, step.Stepper(model, optimizer, precision, micro_batch, ranks), precision


def _shards(settings: TrainerSettings, spec: RunSpec, ranks: Ranks, device: torch.device) -> bool:
    """Whether each rank gets a part of the weights alone; all ranks find the same."""
    free, asked = ranks.least(free_memory(device, ranks.count)), settings.shard_weights
    return shards(spec, ranks.count, free, asked=asked, divides=ranks.divide_sequences)


def _sharded_model(
    settings: TrainerSettings, ranks: Ranks, device: torch.device, weights_fd: int
) -> ShardedModel:
    spec = settings.run_spec()
    with weights_nowhere():
        module = empty_module(spec, settings.vocabulary_size)
    spans = rank_spans(layout_of(module), spec.optimizer, ranks.count, by_size=True)
    end = spec.data.document_end
    return ShardedModel(module, device, ranks, spans, weights_fd, document_end=end)


def _flat_model(
    settings: TrainerSettings, ranks: Ranks, device: torch.device, precision: Precision
) -> FlatModel:
    spec = settings.run_spec()
    # `Load` brings the weights, except those of a checkpoint that adapters leave as it is.
    if spec.adapter is None:
        divided = ranks.divide_sequences
        module = empty_module(spec, settings.vocabulary_size, of_transformers=divided)
    else:
        from peer.training.adapter import halve

        module = adapted_checkpoint(spec, settings.vocabulary_size)
        if precision == "bf16":
            halve(module)
    end = spec.data.document_end
    context = SplitContext(ranks) if ranks.divide_sequences else None
    compiles = spec.training.compile
    model = FlatModel(module, device, compile=compiles, document_end=end, context=context)
    if ranks.divide_sequences:
        model.notes.append(f"each sequence is divided between {ranks.count} processes")
    if settings.checkpoint_activations:
        model.recomputes = recompute_layers(module)
    return model


def _first_micro_batch(settings: TrainerSettings, spec: RunSpec, model: FlatModel) -> int:
    apart = 1 if settings.divide_sequences else settings.ranks  # how many sequences at a time
    share = -(-spec.training.batch_size // apart)
    start = step.starting_micro_batch(spec.training.micro_batch, share, settings.micro_batch_cap)
    if model.device.type != "cpu" or spec.training.micro_batch != "auto":
        return start

    def fitting() -> int:
        return step.cpu_micro_batch(
            start, lambda size: apart * step_memory(spec, size, recomputes=model.recomputes)
        )

    if not (fits := fitting()) and model.recompute():
        fits = fitting()
    return max(1, fits)
