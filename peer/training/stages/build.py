"""Builds a trainer that holds a stage.

The number of microbatches that this machine holds at once is measured: a forward is done before
training, and the tensors that its graph keeps are added up, each memory once, the weights left out.
Most of a slot is this graph. What the trainer takes later is left free: moments, sums of gradients,
logits at the data peers, and a backward, which holds gradients of all its layers (compute.py).
"""

from pathlib import Path

import torch

from peer.codec import get_codec
from peer.training.corpus.folder import open_corpus
from peer.training.device import activation_memory, choose_device, choose_precision
from peer.training.loop import InnerLoop, inner_loop
from peer.training.messages import Ready, TrainerSettings
from peer.training.model import FlatModel, model_config
from peer.training.optimizer import inner_optimizer
from peer.training.pipe import SocketChannel
from peer.training.recomputed import recompute_layers
from peer.training.shared import MAX_SLOTS, RING_PER_SLOT, boundary_shape
from protocol.run.layout import DATA_STAGE
from protocol.run.needs import MIN_SLOTS, later_stage_memory
from protocol.run.run_spec import RunSpec

from .channel import BoundaryCoder, StageChannel
from .compute import StageCompute
from .module import initial_stage
from .steppers import DataPeerStepper, RelayStepper, stage_clip_norm


def graph_bytes(compute: StageCompute, given: torch.Tensor, *, embeds: bool) -> int:
    """Bytes that a microbatch holds between its forward and its backward.

    Args:
        given: activations [b, T, D], or with `embeds` tokens [b, T+1].
    """
    probe, kept = -1, dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, torch.nn.Parameter) and tensor.grad_fn is not None:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = compute.embed(probe, given) if embeds else compute.forward(probe, given)
    compute.forget(probe)
    # Where layers are computed again their inputs are kept, and no hook sees them.
    inputs = made.untyped_storage().nbytes() * compute.num_layers
    return max(sum(kept.values()), inputs)


def slots_for(graph: int, free: int) -> tuple[int, bool]:
    """Returns how many microbatches of `graph` bytes there are to be, and whether they fit."""
    slots = free // max(1, graph)
    return max(MIN_SLOTS, min(MAX_SLOTS, slots)), slots >= MIN_SLOTS


def build_stage(
    settings: TrainerSettings, memory: tuple[int, int], ring_fd: int, pipe: SocketChannel
) -> tuple[InnerLoop, Ready]:
    """The loop of a stage; `memory` as for `inner_loop`."""
    spec, stage = settings.run_spec(), settings.stage
    assert stage is not None
    device = choose_device(settings.device)
    precision = choose_precision(spec.training.precision, device)
    config = model_config(spec, settings.vocabulary_size)
    stages = spec.pipeline.stages
    module = initial_stage(config, spec.seed, stage, stages)
    model = FlatModel(module, device)
    if settings.checkpoint_activations:
        recompute_layers(module)
    clip_norm = stage_clip_norm(spec.optimizer.clip_norm, stages)
    section = spec.optimizer.model_copy(update={"clip_norm": clip_norm})
    optimizer = inner_optimizer(model, section, precision)
    sequences = spec.microbatch_sequences
    coder = BoundaryCoder(get_codec(spec.pipeline.codec), boundary_shape(spec), device)
    compute = StageCompute(module, device, precision)
    slots, fit = measured_slots(compute, spec, device, stage)
    if not fit and model.recompute():
        slots, _ = measured_slots(compute, spec, device, stage)
    channel = StageChannel(pipe, coder.ring(ring_fd, RING_PER_SLOT * slots), coder)
    stepper: DataPeerStepper | RelayStepper
    if stage == DATA_STAGE:
        stepper = DataPeerStepper(
            compute, channel, model, optimizer, sequences=sequences, in_flight=slots
        )
    else:
        stepper = RelayStepper(compute, channel, model, optimizer)
    corpus = open_corpus(
        Path(settings.corpus_path), spec.model.context_length, spec.data.validation_blocks
    )
    loop = inner_loop(settings, memory, corpus, model, stepper, channel)
    # Every stage tells the same speed: all take the same steps, so all owe the same number.
    return loop, loop.ready(precision, sequences, 1.0)


def measured_slots(
    compute: StageCompute, spec: RunSpec, device: torch.device, stage: int
) -> tuple[int, bool]:
    embeds = stage == DATA_STAGE
    sequences, tokens, width = boundary_shape(spec)
    if embeds:
        given = torch.zeros((sequences, tokens + 1), dtype=torch.int64, device=device)
    else:
        given = torch.zeros((sequences, tokens, width), device=device)
    free = activation_memory(device, later_stage_memory(spec, stage, on_gpu=device.type == "cuda"))
    return slots_for(graph_bytes(compute, given, embeds=embeds), free)
