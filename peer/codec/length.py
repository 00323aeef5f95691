"""The length of a vector by its codes, per value: its root mean square."""

import math

import torch

from .base import TILE, Codec


def root_mean_square(codes: torch.Tensor, codec: Codec, num_values: int) -> float:
    """Infinite where the sum of squares is; codes are valid ones."""
    scratch = torch.empty(min(TILE, num_values), dtype=torch.float32, device=codes.device)
    squares = 0.0
    for start in range(0, num_values, TILE):
        values = scratch[: min(TILE, num_values - start)]
        codec.decode_range(codes, start, start + values.numel(), values)
        squares += float(torch.dot(values, values))
    return math.sqrt(squares / max(1, num_values))
