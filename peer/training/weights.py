"""What averaging needs of a model."""

from typing import Protocol

import torch

from protocol.run.layout import Layout


class FastWeights(Protocol):
    """A model as flat vectors, fp32 [P]: its weights, and their gradients.

    The gradient is zero and idle between two steps: its memory serves as scratch, and is left zero.
    """

    theta_P: torch.Tensor
    gradient_P: torch.Tensor
    device: torch.device
    layout: Layout
