"""The gradient of a stage's step: the sum over its microbatches, each measured before it is added.

A backward adds to the model's flat gradient. Here that is emptied after each microbatch into a
second vector, by as much as the microbatch counts (protocol/microbatch/gradient_shares.py). It has
to be measured when it is there: what it adds to the weights is not known from what has come.

At a data peer a microbatch adds twice: for the head when it comes to the loss, for the first layers
when its gradient is back. These are compared with their own kind.
"""

import math
from typing import Final

import torch

from protocol.microbatch.gradient_shares import GradientShares

FIRST_CLIP: Final = 64.0
"""How many times the norm of a whole step the first gradient of a trainer's life may have."""


class GradientSum:
    """See the top of the file.

    Args:
        gradient_P: the model's, zero between two microbatches.
        clip_norm: at which the stage's step is clipped.
    """

    def __init__(self, gradient_P: torch.Tensor, clip_norm: float) -> None:
        self._gradient_P = gradient_P
        self._sum_P = torch.zeros_like(gradient_P)
        self._first = FIRST_CLIP * clip_norm
        self._shares: dict[str, GradientShares] = {}
        self._told = 0

    def add(self, kind: str) -> None:
        """Take what a microbatch has left in the model's gradient.

        Args:
            kind: it is compared with others of the same.
        """
        shares = self._shares.setdefault(kind, GradientShares(self._first))
        share = shares.share(length_of(self._gradient_P))
        if share:
            self._sum_P.add_(self._gradient_P, alpha=share)
        self._gradient_P.zero_()

    def take(self) -> int:
        """Put the sum into the model's gradient. Returns how many counted less since the last."""
        self._gradient_P.copy_(self._sum_P)
        self._sum_P.zero_()
        clipped = sum(shares.num_clipped for shares in self._shares.values())
        new, self._told = clipped - self._told, clipped
        return new


def length_of(values_P: torch.Tensor) -> float:
    """The Euclidean norm, also where the sum of squares is beyond fp32."""
    norm = float(torch.linalg.vector_norm(values_P))
    if math.isfinite(norm):
        return norm
    largest = float(torch.linalg.vector_norm(values_P, math.inf))
    if not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(values_P / largest))
