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

Ways to the same bytes: torch's operations (`int4_plain`), on CUDA too, and compiled loops
(`int4_kernels`).
"""

from typing import ClassVar

from .blocks import BlockCodec, BlockFormat
from .int4_plain import INT4_FORMAT, PlainLoops


class Int4Codec(BlockCodec):
    """The int4 codec; see the theory above."""

    name: ClassVar[str] = "int4"
    format: ClassVar[BlockFormat] = INT4_FORMAT
    kernels_module: ClassVar[str] = "peer.codec.int4_kernels"

    def __init__(self, part_of: int = 0) -> None:
        super().__init__(PlainLoops(), part_of)
