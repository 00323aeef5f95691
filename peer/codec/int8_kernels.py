"""The int8 code (`peer.codec.codecs`) as compiled loops over blocks, one pass over memory each.

For numbers that are not negative, the order of fp32 values is the order of their bits as integers,
with infinity and then NaN above all: one maximum of integers gives the largest magnitude of a
block, and whether all is finite. Adding 1.5 * 2**23 to |q| <= 127 rounds q to the nearest integer,
ties to even, and leaves it in the lowest bits of the sum: rounding and narrowing are one addition.

Importing this file compiles it; go through `peer.codec.compiled.kernels_of`.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from . import BLOCK
from .codecs import Int8Codec
from .compiled import helper, kernel

Array = npt.NDArray[Any]
Integer = int | np.integer[Any]

_MAGNITUDE_BITS: Final = np.int32(0x7FFFFFFF)
_HALF_BITS: Final = np.int32(16)
_LOW_HALF: Final = np.int32(0xFFFF)


@helper()
def values_of(array: Array, first: int, last: int) -> Array:
    """The values of blocks first .. last - 1.

    Loops over them count from 0, so LLVM vectorizes them: an index that might be negative would
    count from the end of the array.
    """
    return array[first * BLOCK : last * BLOCK]


@helper(as_text=True)
def largest_bits(x_bits: Array, at: int) -> np.int32:
    top = np.int32(0)
    for i in range(BLOCK):
        top = max(top, x_bits[at + i] & _MAGNITUDE_BITS)
    return top


@helper()
def scale_of(top: np.int32, largest_level: np.float32, smallest_scale: np.float32) -> np.int32:
    """The bits of the bf16 scale of a block whose largest magnitude has the bits `top`."""
    scale = np.float32(np.int32(top).view(np.float32) / largest_level)
    if scale < smallest_scale:
        return np.int32(0)
    return np.int32((scale.view(np.int32) + _LOW_HALF) >> _HALF_BITS)


@helper()
def scale_from(half: Integer) -> np.float32:
    return np.int32(np.int32(half) << _HALF_BITS).view(np.float32)


@helper()
def are_scales_valid(scales: Array, smallest_bits: Integer, largest_bits: Integer) -> bool:
    good = True
    for bits in scales:
        good &= bits == 0 or smallest_bits <= bits <= largest_bits
    return good


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
