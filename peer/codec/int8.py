"""int8 with one bf16 scale per block of 128 values: 1.0156 bytes per value.

A code of blocks (`peer.codec.blocks`). For a block with largest magnitude m:

    scale = m / 127, rounded up to bf16          (0 when that is below 2**-126)
    code  = round_half_even(x / scale)           in -127 .. 127
    value = code * scale                         exact in fp32: 7 bits times 8 bits

So |value - x| <= scale / 2, at most m / 127 (m / 252 but for the last bits). (fp16 scales would
underflow below m = 7.6e-6; these do below m = 1.5e-36.)

A block is coded to itself again if its largest code is 127. Where rounding up left 126, the scale
shrinks by one bf16 step on the second coding, and the values move by at most half the scale again.
"""

from typing import ClassVar, Final

import torch

from .base import BLOCK, LARGEST_MAGNITUDE
from .blocks import BlockCodec

LARGEST_CODE: Final = 127


class Int8Codec(BlockCodec):
    """The int8 codec: a level is the code itself."""

    name: ClassVar[str] = "int8"
    block_bytes: ClassVar[int] = BLOCK
    code_type: ClassVar[torch.dtype] = torch.int8
    largest_level: ClassVar[float] = float(LARGEST_CODE)
    smallest_scale: ClassVar[float] = 2.0**-126
    largest_scale: ClassVar[float] = LARGEST_MAGNITUDE / (LARGEST_CODE - 1)
    kernels_module: ClassVar[str] = "peer.codec.int8_kernels"
    triton_module: ClassVar[str | None] = "peer.codec.int8_cuda"

    def _write_codes(
        self, x: torch.Tensor, scale: torch.Tensor, work: torch.Tensor, codes: torch.Tensor
    ) -> None:
        torch.div(x, scale, out=work)
        codes.copy_(work.round_())

    def _read_levels(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(codes)

    def _are_codes_valid(self, codes: torch.Tensor) -> bool:
        """Whether no code is -128, which `encode` never writes."""
        return int(codes.min()) >= -LARGEST_CODE


class Int8DiffCodec(Int8Codec):
    """The same codes; pairs send them as differences (`peer.codec.differences`)."""

    name: ClassVar[str] = "int8-diff"
