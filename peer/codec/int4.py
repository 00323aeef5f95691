"""int4, for outer gradients: four bits per value, 4.125 with one bf16 scale per block of 128.

A code of blocks (`peer.codec.blocks`). For a block with largest magnitude m:

    scale = m / 7, rounded up to bf16            (0 when that is below 2**-125)
    value = a level, -7 to 7, times the scale

Relative L2 error on values that are spread as Gauss 0.12, as Laplace 0.16, as Student with 3
degrees 0.22; outer gradients have no longer tails than Gauss's (docs/log.md).

Rules:

- A value goes to the nearest level; one that lies midway goes to the smaller magnitude. So the
  error is at most scale / 2.
- A midpoint times a scale is exact in fp32, and so is a level times a scale: nothing is divided by
  the scale, and which of two levels is nearer is decided without rounding.
- A code is the level's magnitude, and 8 more for negative. Code 8, a negative zero, is never
  written and not accepted.
- Byte i of a block holds value i in its low half and value i + 64 in its high half: no loop has to
  take neighbours apart.
- With the smallest scale the smallest midpoint is a normal number. A block below it becomes zeros.
- Decoded values are coded to themselves: the largest magnitude of a block always takes level 7, and
  the decoded one gives the same scale.
"""

from typing import ClassVar, Final

import torch

from .base import BLOCK
from .blocks import BlockCodec

LEVELS: Final = tuple(sign * float(level) for sign in (1, -1) for level in range(8))
"""What each of the 16 codes stands for; the eighth is not used."""
MIDPOINTS: Final = tuple(level + 0.5 for level in range(7))
HALF: Final = BLOCK // 2


class Int4Codec(BlockCodec):
    """The int4 codec: a level's magnitude, and a bit for negative."""

    name: ClassVar[str] = "int4"
    block_bytes: ClassVar[int] = HALF
    code_type: ClassVar[torch.dtype] = torch.uint8
    largest_level: ClassVar[float] = 7.0
    smallest_scale: ClassVar[float] = 2.0**-125
    largest_scale: ClassVar[float] = 147 * 2.0**110  # LARGEST_MAGNITUDE / 7, rounded up to bf16
    kernels_module: ClassVar[str] = "peer.codec.int4_kernels"

    def _write_codes(
        self, x: torch.Tensor, scale: torch.Tensor, work: torch.Tensor, codes: torch.Tensor
    ) -> None:
        magnitudes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
        for midpoint in MIDPOINTS:
            magnitudes += work > scale * midpoint
        negative = (x < 0) & (magnitudes > 0)
        nibbles = magnitudes | (negative.to(torch.uint8) << 3)
        torch.bitwise_or(nibbles[:, :HALF], nibbles[:, HALF:] << 4, out=codes)

    def _read_levels(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        levels = torch.tensor(LEVELS, device=codes.device)
        out[:, :HALF] = levels[(codes & 15).int()]
        out[:, HALF:] = levels[(codes >> 4).int()]

    def _are_codes_valid(self, codes: torch.Tensor) -> bool:
        """Whether no code is a negative zero, which `encode` never writes."""
        return not bool((((codes & 0x0F) == 0x08) | ((codes & 0xF0) == 0x80)).any())
