"""The int8 code in torch's operations."""

from typing import Final

import torch

from .base import BLOCK, LARGEST_MAGNITUDE
from .blocks import BlockFormat
from .blocks_plain import TiledLoops

_LARGEST_CODE: Final = 127
INT8_FORMAT: Final = BlockFormat(
    code_bytes=BLOCK,
    code_type=torch.int8,
    largest_level=float(_LARGEST_CODE),
    smallest_scale=2.0**-126,
    largest_scale=LARGEST_MAGNITUDE / (_LARGEST_CODE - 1),
)


class PlainLoops(TiledLoops):
    """int8 loops in torch's operations: a level is the code itself."""

    def __init__(self) -> None:
        super().__init__(INT8_FORMAT)

    def _write_codes(
        self, x: torch.Tensor, scale: torch.Tensor, work: torch.Tensor, codes: torch.Tensor
    ) -> None:
        torch.div(x, scale, out=work)
        codes.copy_(work.round_())

    def _read_levels(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(codes)

    def _codes_valid(self, codes: torch.Tensor) -> bool:
        """Whether no code is -128, which `encode` never writes."""
        return int(codes.min()) >= -_LARGEST_CODE
