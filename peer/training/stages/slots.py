"""How many microbatches this machine holds at once, from what one of them is measured to hold.

A forward is done once before training, and the tensors that its graph keeps are added up, each
memory once, those of the weights not. Most of a slot is this graph. One slot's worth is left to the
backward, which holds gradients of the same sizes (deferred.py).
"""

from typing import Any, Final

import psutil
import torch

from .compute import StageCompute
from .sizes import MAX_SLOTS, MIN_SLOTS

CPU_SHARE: Final = 0.25
"""Part of the free memory for graphs on a CPU, where running out kills other processes."""
CUDA_SHARE: Final = 0.8
PROBE: Final = -1
"""Number of the microbatch that is measured."""


def graph_bytes(compute: StageCompute, given: torch.Tensor, *, embeds: bool) -> int:
    """What a microbatch holds between its forward and its backward.

    Args:
        given: activations [b, T, D]; tokens [b, T+1] where they are embedded here.
        embeds: whether they are.
    """
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, torch.nn.Parameter) and tensor.grad_fn is not None:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, _as_it_is):
        made = compute.embed(PROBE, given) if embeds else compute.forward(PROBE, given)
    compute.forget(PROBE)
    # Where layers are checkpointed their inputs are kept, and no hook sees them.
    inputs = made.untyped_storage().nbytes() * compute.num_layers
    return max(sum(kept.values()), inputs)


def _as_it_is(tensor: Any) -> Any:
    return tensor


def free_bytes(device: torch.device) -> int:
    """Memory for graphs."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_SHARE)
    return int(psutil.virtual_memory().available * CPU_SHARE)


def slots_for(graph: int, free: int) -> int:
    """Microbatches of so many bytes that fit, and a backward's beside them; within the bounds."""
    return max(MIN_SLOTS, min(MAX_SLOTS, free // max(1, graph) - 1))
