"""Four bits per value, for outer gradients: e3m0 and int4, each 4.125 bits with its scales.

Codes of blocks (`peer.codec.blocks`) with 15 values on a grid of eight magnitudes and a sign. For a
block with largest magnitude m:

    int4    0, 1, 2, .. 7 times the scale                 scale = m / 7, rounded up to bf16
    e3m0    0, 1/64, 1/32, .. 1/2, 1 times the scale      scale = m, rounded up to bf16

e3m0 has one sign bit, three bits of exponent and no mantissa: precise by ratio, as int4 is by
distance. (Streaming DiLoCo, arXiv 2501.18512, sends outer gradients so; it says nothing of scales,
rounding and zeros, which are our choice.) Relative L2 error on values that are spread as

                Gauss   Laplace   Student, 3 degrees
    e3m0        0.19    0.19      0.17
    int4        0.12    0.16      0.22

so which is better is a question of the tails in a block. In the outer gradients that were measured
(`bench/outer_codes.py`) those are no longer than Gauss's: int4 errs about half as much.

Rules:

- A value goes to the nearest magnitude, by distance in both codes; one that lies midway goes to
  the smaller. So int4 errs by at most scale / 2; e3m0 by |x| / 3, or scale / 128 near zero.
- A midpoint times a scale is exact in fp32, and so is a level times a scale: nothing is divided by
  the scale, and which of two levels is nearer is decided without rounding.
- A code is 8 for negative plus the place of the magnitude. Code 8, a negative zero, is never
  written and not accepted.
- Byte i of a block holds value i in its low half and value i + 64 in its high half: no loop has to
  take neighbours apart.
- The smallest scale is 2**-125 in int4 and 2**-119 in e3m0: the smallest midpoint is then a normal
  number. A block below it becomes zeros.
- Decoded values are coded to themselves: the largest magnitude of a block always takes the largest
  level, and the decoded one gives the same scale.

Ways to the same bytes: torch's operations (`four_bit_plain`), on CUDA too, and compiled loops
(`four_bit_kernels`).
"""

from types import ModuleType
from typing import ClassVar

import numpy as np

from .base import Array
from .blocks import BlockCodec, BlockFormat
from .blocks_compiled import Kernels
from .compiled import kernels_of
from .four_bit_grid import E3M0_GRID, INT4_GRID, Grid
from .four_bit_plain import PlainLoops


class GridKernels:
    """The compiled loops with one grid (`peer.codec.blocks_compiled.Kernels`)."""

    def __init__(self, module: ModuleType, grid: Grid) -> None:
        numbers = grid.format
        self._module = module
        self._rounding = (
            tuple(np.float32(midpoint) for midpoint in grid.midpoints),
            np.float32(numbers.largest_level),
            np.float32(numbers.smallest_scale),
        )
        self._signed = np.array(grid.signed, np.float32)
        bounds = np.array([numbers.smallest_scale, numbers.largest_scale], np.float32)
        self._scale_bounds = tuple(bounds.view(np.uint32) >> 16)

    def encode_blocks(
        self, x_P: Array, x_bits: Array, codes: Array, scales: Array, first: int, last: int, /
    ) -> int:
        encode = self._module.encode_blocks
        largest: int = encode(x_P, x_bits, codes, scales, *self._rounding, first, last)
        return largest

    def decode_blocks(
        self, codes: Array, scales: Array, out: Array, out_first: int, first: int, last: int, /
    ) -> None:
        self._module.decode_blocks(codes, scales, out, self._signed, out_first, first, last)

    def are_valid(self, codes: Array, scales: Array, first: int, last: int, /) -> bool:
        return bool(self._module.are_valid(codes, scales, *self._scale_bounds, first, last))


class FourBitCodec(BlockCodec):
    """A codec of four bits; see the theory above. The two codecs differ in the grid."""

    grid: ClassVar[Grid]
    kernels_module: ClassVar[str] = "peer.codec.four_bit_kernels"

    def __init__(self, part_of: int = 0) -> None:
        super().__init__(PlainLoops(self.grid), part_of)

    def _kernels(self) -> Kernels | None:
        module = kernels_of(self.kernels_module)
        return GridKernels(module, self.grid) if module else None


class Int4Codec(FourBitCodec):
    """The 4-bit codec with levels at equal distances."""

    name: ClassVar[str] = "int4"
    grid: ClassVar[Grid] = INT4_GRID
    format: ClassVar[BlockFormat] = INT4_GRID.format


class E3m0Codec(FourBitCodec):
    """The 4-bit codec with levels at equal ratios."""

    name: ClassVar[str] = "e3m0"
    grid: ClassVar[Grid] = E3M0_GRID
    format: ClassVar[BlockFormat] = E3M0_GRID.format
