"""bf16 and fp32: the values themselves, to compare int8 with. Native (little-endian) byte order."""

from collections.abc import Sequence
from typing import ClassVar

import torch

from .base import (
    BLOCK,
    LARGEST_MAGNITUDE,
    NOT_FINITE,
    TILE,
    FusedLoops,
    check_codes,
    check_range,
    check_values,
)


class PlainCodec:
    """Each value as one element of `dtype`, rounded to nearest, ties to even.

    Args:
        part_of: as `get_codec` has it; the same loops code vectors of any length.
    """

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype]

    def __init__(self, part_of: int = 0) -> None:
        pass

    @property
    def planes(self) -> tuple[int, ...]:
        """The values themselves."""
        return (self.code_bytes(BLOCK),)

    def code_bytes(self, num_values: int) -> int:
        """Bytes of the codes of `num_values` values."""
        return num_values * self.dtype.itemsize

    def encode(self, x_P: torch.Tensor, out_codes: torch.Tensor) -> None:
        """Write the codes of `x_P`. Raises ValueError if a value is not finite or too large."""
        num_values = check_values(x_P, "x_P")
        check_codes(out_codes, self.code_bytes(num_values))
        out = out_codes.view(self.dtype)
        for start in range(0, num_values, TILE):
            tile = out[start : start + TILE]
            tile.copy_(x_P[start : start + TILE])
            if not _in_range(tile):
                raise ValueError(NOT_FINITE)

    def decode(self, codes: torch.Tensor, out_P: torch.Tensor) -> None:
        """Write the values of `codes` into `out_P`."""
        num_values = check_values(out_P, "out_P")
        check_codes(codes, self.code_bytes(num_values))
        out_P.copy_(codes.view(self.dtype))

    def decode_range(self, codes: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
        """Write the values start .. stop - 1 into `out`."""
        num_values = codes.numel() // self.dtype.itemsize
        check_codes(codes, self.code_bytes(num_values))
        check_range(start, stop, num_values, out)
        out.copy_(codes.view(self.dtype)[start:stop])

    def validate(self, codes: torch.Tensor) -> bool:
        """Whether the length fits whole blocks and every value is finite and small enough."""
        if codes.dtype != torch.uint8 or codes.dim() != 1 or not codes.is_contiguous():
            return False
        if codes.numel() % (BLOCK * self.dtype.itemsize):
            return False
        values = codes.view(self.dtype)
        return all(_in_range(tile) for tile in values.split(TILE))

    def loops_for(self, num_values: int, device: torch.device) -> str:
        """Torch's own, always."""
        return "plain"

    def fused_loops(
        self,
        way: str,
        all_codes: Sequence[torch.Tensor],
        vectors: Sequence[torch.Tensor],
        start: int = 0,
    ) -> FusedLoops | None:
        """None: torch's operations do."""
        return None


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
