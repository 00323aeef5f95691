"""What averaging needs of a model."""

import warnings
from typing import Protocol

import torch

from protocol.run.layout import Layout

from .shared import map_vector


class FastWeights(Protocol):
    """A model as flat vectors, fp32 [P]: its weights, and their gradients.

    The gradient is zero and idle between two steps: its memory serves as scratch, and is left zero.
    """

    theta_P: torch.Tensor
    gradient_P: torch.Tensor
    device: torch.device
    layout: Layout


def map_slow_weights(fd: int) -> torch.Tensor:
    """The slow weights in this memory, fp32 [P]; only ever read them."""
    with warnings.catch_warnings():
        # torch has no read-only tensors; the mapping itself is, so a write would end the process,
        # not harm the daemon.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(map_vector(fd))
