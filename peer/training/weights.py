"""What averaging needs of a model."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def set_aside(model: FastWeights) -> Iterator[torch.Tensor]:
    """theta [P], to be overwritten within the block; bit for bit the same when it ends.

    It waits in the gradient, which is idle between two steps.
    """
    model.gradient_P.copy_(model.theta_P)
    try:
        yield model.theta_P
    finally:
        model.theta_P.copy_(model.gradient_P)
        model.gradient_P.zero_()


def map_slow_weights(fd: int) -> torch.Tensor:
    """The slow weights in this memory, fp32 [P]; only ever read them."""
    with warnings.catch_warnings():
        # torch has no read-only tensors; the mapping itself is, so a write would end the process,
        # not harm the daemon.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(map_vector(fd))
