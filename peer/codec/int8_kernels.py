"""The int8 code (`peer.codec.int8`) as compiled loops over blocks, one pass over memory each.

Adding 1.5 * 2**23 to |q| <= 127 rounds q to the nearest integer, ties to even, and leaves that
integer in the lowest bits of the sum: rounding and narrowing are one addition.

Importing this file compiles it; go through `peer.codec.compiled.kernels_of`.
"""

from typing import Final

import numpy as np

from .base import BLOCK
from .blocks_kernels import (
    Array,
    are_scales_valid,
    largest_bits,
    scale_from,
    scale_of,
    values_of,
)
from .compiled import kernel
from .int8 import Int8Codec

_LARGEST_CODE: Final = np.float32(Int8Codec.largest_level)
_SMALLEST_SCALE: Final = np.float32(Int8Codec.smallest_scale)
_SMALLEST_SCALE_BITS: Final = np.uint16(_SMALLEST_SCALE.view(np.uint32) >> 16)
_LARGEST_SCALE_BITS: Final = np.uint16(np.float32(Int8Codec.largest_scale).view(np.uint32) >> 16)
_ROUNDING: Final = np.float32(1.5 * 2**23)
_ONE: Final = np.float32(1)


@kernel("int32(float32[::1], int32[::1], int8[::1], uint16[::1], int64, int64)")
def encode_blocks(
    x_P: Array, x_bits: Array, codes: Array, scales: Array, first: int, last: int
) -> int:
    """Code blocks first .. last - 1. Returns the bits of the largest magnitude met.

    `x_bits` is the memory of `x_P` as integers, `scales` that of the bf16 scales.
    """
    largest = np.int32(0)
    x_P, x_bits, codes = (
        values_of(x_P, first, last),
        values_of(x_bits, first, last),
        values_of(codes, first, last),
    )
    scales = scales[first:last]
    for block in range(scales.size):
        at = block * BLOCK
        top = largest_bits(x_bits, at)
        largest = max(largest, top)
        half = scale_of(top, _LARGEST_CODE, _SMALLEST_SCALE)
        scales[block] = half
        divisor = scale_from(half) if half else _ONE
        for i in range(BLOCK):
            codes[at + i] = np.float32(x_P[at + i] / divisor + _ROUNDING).view(np.int32)
    return largest  # type: ignore[return-value]


@kernel("void(int8[::1], uint16[::1], float32[::1], int64, int64, int64)")
def decode_blocks(
    codes: Array, scales: Array, out: Array, out_first: int, first: int, last: int
) -> None:
    """Write the values of blocks first .. last - 1 into `out`, which begins at `out_first`."""
    out, codes = values_of(out, first - out_first, last - out_first), values_of(codes, first, last)
    scales = scales[first:last]
    for block in range(scales.size):
        scale = scale_from(scales[block])
        at = block * BLOCK
        for i in range(BLOCK):
            out[at + i] = np.float32(codes[at + i]) * scale


@kernel("boolean(int8[::1], uint16[::1], int64, int64)")
def are_valid(codes: Array, scales: Array, first: int, last: int) -> bool:
    """Whether no code of the blocks is -128, and each scale is +0 or within its bounds."""
    smallest = np.int8(0)
    for code in values_of(codes, first, last):
        smallest = min(smallest, code)
    good = smallest > np.int8(-128)
    return bool(
        good and are_scales_valid(scales[first:last], _SMALLEST_SCALE_BITS, _LARGEST_SCALE_BITS)
    )
