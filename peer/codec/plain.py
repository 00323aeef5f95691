"""bf16 and fp32: the values themselves, to compare int8 with. Native (little-endian) byte order."""

from typing import ClassVar

import torch

from .base import BLOCK, LARGEST_MAGNITUDE, NOT_FINITE, TILE, Codec


class PlainCodec(Codec):
    """Each value as one element of `dtype`, rounded to nearest, ties to even."""

    dtype: ClassVar[torch.dtype]

    def __init_subclass__(cls) -> None:
        cls.planes = (BLOCK * cls.dtype.itemsize,)

    def _encode(self, x_P: torch.Tensor, codes: torch.Tensor) -> None:
        out = codes.view(self.dtype)
        for start in range(0, x_P.numel(), TILE):
            tile = out[start : start + TILE]
            tile.copy_(x_P[start : start + TILE])
            if not _in_range(tile):
                raise ValueError(NOT_FINITE)

    def _decode(self, codes: torch.Tensor, start: int, out: torch.Tensor) -> None:
        out.copy_(codes.view(self.dtype)[start : start + out.numel()])

    def _are_valid(self, codes: torch.Tensor) -> bool:
        return all(_in_range(tile) for tile in codes.view(self.dtype).split(TILE))


def _in_range(values: torch.Tensor) -> bool:
    return bool((values.abs() <= LARGEST_MAGNITUDE).all())


class Bf16Codec(PlainCodec):
    """Two bytes per value."""

    name = "bf16"
    dtype = torch.bfloat16


class Fp32Codec(PlainCodec):
    """Four bytes per value, exact."""

    name = "fp32"
    dtype = torch.float32
