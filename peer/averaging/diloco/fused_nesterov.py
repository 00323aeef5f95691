"""Step and average of chunks through the codec's compiled loops, where fit (`int8_nesterov`)."""

from typing import Final

import numpy as np
import torch

from peer.codec import BLOCK, Codec
from peer.codec.compiled import in_chunks

WAY: Final = "diloco"
"""The name under which a codec's row has loops for both (protocol/run/ways.py)."""

Vectors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""phi and v before, phi and v after."""


def step(
    result_codes: torch.Tensor,
    start: int,
    vectors: Vectors,
    codec: Codec,
    factors: tuple[float, float],
    *,
    keep: bool,
) -> bool:
    """Take the outer step of the chunk's values from `start` on; lengths and types are checked.

    Args:
        factors: learning rate and momentum.
        keep: as `nesterov.step_pieces` has it.

    Returns:
        False, and nothing done, if no compiled loop fits.
    """
    fused = codec.fused_loops(WAY, [result_codes], vectors, start)
    if fused is None:
        return False
    arrays = (*fused.codes[0], *(vector.numpy() for vector in vectors))
    numbers = tuple(map(np.float32, factors))
    in_chunks(
        lambda first, last: fused.kernels.step_blocks(*arrays, numbers, keep, first, last),
        vectors[0].numel() // BLOCK,
    )
    return True


def add(codes: torch.Tensor, share: float, codec: Codec, start: int, mean: torch.Tensor) -> bool:
    """Add a share of the values from `start` on. False, and nothing done, if no loop fits."""
    fused = codec.fused_loops(WAY, [codes], [mean], start)
    if fused is None:
        return False
    last = mean.numel() // BLOCK
    fused.kernels.add_blocks(*fused.codes[0], mean.numpy(), np.float32(share), 0, last)
    return True
