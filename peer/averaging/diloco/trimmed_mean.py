"""The trimmed mean of a chunk: in each coordinate the highest and the lowest are left out.

Idea. Clipping by length (protocol/plausible.py) bounds how far one contribution pulls in all; it
says nothing of where it pulls. In each coordinate the values of n contributions are put in order,
the k = floor(0.3 n) on either side are left out, and the weighted mean of the rest is taken (Yin et
al. 2018, arXiv 1803.01498, with weights). So k contributions, however they agree, move no
coordinate beyond what the others span.

Rules:
- Of fewer than LEAST_TRIMMED contributions none is left out: clipping is what there is, then. It
  comes first in any case.
- Equal bytes everywhere, also of a leaf that is worked out by itself (leaf_average.py): everything
  is done value by value, in one order, each operation rounded to fp32 by itself. Of equal values
  the one whose contribution comes first is the lower.
- What is left has other weights in each coordinate, so each is divided by its own.
"""

from collections.abc import Sequence
from typing import Final

import torch

TRIMMED_TENTHS: Final = 3
LEAST_TRIMMED: Final = 5


def num_trimmed(contributions: int) -> int:
    """How many are left out on either side."""
    return TRIMMED_TENTHS * contributions // 10 if contributions >= LEAST_TRIMMED else 0


def trimmed_mean(values_NC: torch.Tensor, weights: Sequence[int], out_C: torch.Tensor) -> None:
    """Write the weighted mean of what is left.

    Args:
        values_NC: fp32, of N contributions, clipped.
        weights: of each, above 0.
        out_C: fp32, overwritten.
    """
    num, total = len(weights), sum(weights)
    shares_N = torch.tensor([weight / total for weight in weights], dtype=torch.float32)
    order_NC = values_NC.argsort(dim=0, stable=True)
    left_C = torch.zeros_like(out_C)
    out_C.zero_()
    for rank in range(num_trimmed(num), num - num_trimmed(num)):
        chosen_C = order_NC[rank]
        share_C = shares_N.to(out_C.device)[chosen_C]
        value_C = values_NC.gather(0, chosen_C.unsqueeze(0)).squeeze(0)
        out_C.add_(value_C.mul_(share_C))
        left_C.add_(share_C)
    out_C.div_(left_C)
