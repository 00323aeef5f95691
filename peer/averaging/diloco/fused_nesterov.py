"""Step and average of chunks through compiled loops (`int8_nesterov`), where they fit."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from peer.codec import BLOCK, Codec
from peer.codec.blocks_compiled import scale_bits
from peer.codec.compiled import in_chunks, kernels_of
from peer.codec.int8 import Int8Codec, split

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
    if start % BLOCK or vectors[0].numel() % BLOCK:
        return False
    fitting = _fitting(codec, result_codes, vectors)
    if fitting is None:
        return False
    kernels, (codes, scales, *arrays) = fitting
    codes, scales = codes[start:], scales[start // BLOCK :]
    numbers = tuple(map(np.float32, factors))
    in_chunks(
        lambda first, last: kernels.step_blocks(codes, scales, *arrays, numbers, keep, first, last),
        vectors[0].numel() // BLOCK,
    )
    return True


def add(codes: torch.Tensor, share: float, codec: Codec, start: int, mean: torch.Tensor) -> bool:
    """Add a share of the values from `start` on. False, and nothing done, if no loop fits."""
    fitting = _fitting(codec, codes, (mean,))
    if fitting is None:
        return False
    kernels, arrays = fitting
    first = start // BLOCK
    kernels.add_blocks(*arrays, np.float32(share), first, first + mean.numel() // BLOCK)
    return True


def _fitting(
    codec: Codec, codes: torch.Tensor, vectors: tuple[torch.Tensor, ...]
) -> tuple[Any, tuple[npt.NDArray[Any], ...]] | None:
    """The loops, and what lies in memory as they take it."""
    if not isinstance(codec, Int8Codec):
        return None
    codes_C, scales = split(codes)
    if not codec.is_compiled_for(scales.numel() * BLOCK, scales, *vectors):
        return None
    kernels = kernels_of("peer.averaging.diloco.int8_nesterov")
    if kernels is None:
        return None
    return kernels, (codes_C.numpy(), scale_bits(scales), *(vector.numpy() for vector in vectors))
