"""The 4-bit codes in torch's operations."""

from typing import Final

import torch

from .base import BLOCK
from .blocks_plain import TiledLoops
from .four_bit_grid import Grid

_HALF: Final = BLOCK // 2


class PlainLoops(TiledLoops):
    """4-bit loops in torch's operations: a code is a place in the grid, and a sign."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid.format)
        self._midpoints = grid.midpoints
        self._signed = torch.tensor(grid.signed)

    def _write_codes(
        self, x: torch.Tensor, scale: torch.Tensor, work: torch.Tensor, codes: torch.Tensor
    ) -> None:
        places = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
        for midpoint in self._midpoints:
            places += work > scale * midpoint
        negative = (x < 0) & (places > 0)
        nibbles = places | (negative.to(torch.uint8) << 3)
        torch.bitwise_or(nibbles[:, :_HALF], nibbles[:, _HALF:] << 4, out=codes)

    def _read_levels(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        signed = self._signed.to(codes.device)
        out[:, :_HALF] = signed[(codes & 15).int()]
        out[:, _HALF:] = signed[(codes >> 4).int()]

    def _codes_valid(self, codes: torch.Tensor) -> bool:
        """Whether no code is a negative zero, which `encode` never writes."""
        return not bool((((codes & 0x0F) == 0x08) | ((codes & 0xF0) == 0x80)).any())
