"""The int4 code in torch's operations."""

from typing import Final

import torch

from .base import BLOCK
from .blocks import BlockFormat
from .blocks_plain import TiledLoops

LEVELS: Final = tuple(sign * float(level) for sign in (1, -1) for level in range(8))
"""What each of the 16 codes stands for; the eighth is not used."""
MIDPOINTS: Final = tuple(level + 0.5 for level in range(7))
INT4_FORMAT: Final = BlockFormat(
    code_bytes=BLOCK // 2,
    code_type=torch.uint8,
    largest_level=7.0,
    smallest_scale=2.0**-125,
    largest_scale=147 * 2.0**110,  # LARGEST_MAGNITUDE / 7, rounded up to bf16
)
_HALF: Final = BLOCK // 2


class PlainLoops(TiledLoops):
    """int4 loops in torch's operations."""

    def __init__(self) -> None:
        super().__init__(INT4_FORMAT)
        self._levels = torch.tensor(LEVELS)

    def _write_codes(
        self, x: torch.Tensor, scale: torch.Tensor, work: torch.Tensor, codes: torch.Tensor
    ) -> None:
        magnitudes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
        for midpoint in MIDPOINTS:
            magnitudes += work > scale * midpoint
        negative = (x < 0) & (magnitudes > 0)
        nibbles = magnitudes | (negative.to(torch.uint8) << 3)
        torch.bitwise_or(nibbles[:, :_HALF], nibbles[:, _HALF:] << 4, out=codes)

    def _read_levels(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        levels = self._levels.to(codes.device)
        out[:, :_HALF] = levels[(codes & 15).int()]
        out[:, _HALF:] = levels[(codes >> 4).int()]

    def _codes_valid(self, codes: torch.Tensor) -> bool:
        """Whether no code is a negative zero, which `encode` never writes."""
        return not bool((((codes & 0x0F) == 0x08) | ((codes & 0xF0) == 0x80)).any())
