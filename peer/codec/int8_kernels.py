"""The int8 code (`peer.codec.int8`) as compiled loops over blocks, one pass over memory each.

Two identities make them fast without changing a bit:

- For numbers that are not negative, the order of fp32 values is the order of their bits as
  integers, with infinity and then NaN above all: the largest magnitude of a block, and whether all
  is finite, is one maximum of integers.
- Adding 1.5 * 2**23 to |q| <= 127 rounds q to the nearest integer, ties to even, and leaves that
  integer in the lowest bits of the sum: rounding and narrowing are one addition.

Importing this file compiles it; go through `peer.codec.compiled.kernels_of`.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .base import BLOCK, LARGEST_MAGNITUDE
from .compiled import helper, kernel

Array = npt.NDArray[Any]

MAGNITUDE_BITS: Final = np.int32(0x7FFFFFFF)
LARGEST_MAGNITUDE_BITS: Final = int(np.float32(LARGEST_MAGNITUDE).view(np.int32))
_LARGEST_CODE: Final = np.float32(127)
_SMALLEST_SCALE: Final = np.float32(2.0**-126)
_SMALLEST_SCALE_BITS: Final = np.uint16(0x0080)
_LARGEST_SCALE_BITS: Final = np.uint16(np.float32(LARGEST_MAGNITUDE / 126).view(np.uint32) >> 16)
_ROUNDING: Final = np.float32(1.5 * 2**23)
_LOW_HALF: Final = np.int32(0xFFFF)
_HALF_BITS: Final = np.int32(16)
_ONE: Final = np.float32(1)


@helper()
def _values(array: Array, first: int, last: int) -> Array:
    """The values of blocks first .. last - 1.

    Loops over them count from 0, so LLVM makes vectors of them: an index that it cannot tell from a
    negative one would mean the end of the array.
    """
    return array[first * BLOCK : last * BLOCK]


@kernel("int32(float32[::1], int32[::1], int8[::1], uint16[::1], int64, int64)")
def encode_blocks(
    x_P: Array, x_bits: Array, codes: Array, scales: Array, first: int, last: int
) -> int:
    """Code blocks first .. last - 1. Returns the bits of the largest magnitude met.

    `x_bits` is the memory of `x_P` as integers, `scales` that of the bf16 scales.
    """
    largest = np.int32(0)
    x_P, x_bits, codes = (
        _values(x_P, first, last),
        _values(x_bits, first, last),
        _values(codes, first, last),
    )
    scales = scales[first:last]
    for block in range(scales.size):
        at = block * BLOCK
        top = np.int32(0)
        for i in range(BLOCK):
            top = max(top, x_bits[at + i] & MAGNITUDE_BITS)
        largest = max(largest, top)
        scale = np.float32(np.int32(top).view(np.float32) / _LARGEST_CODE)
        half = np.int32(0)
        if scale >= _SMALLEST_SCALE:
            half = (scale.view(np.int32) + _LOW_HALF) >> _HALF_BITS
        scales[block] = half
        divisor = np.int32(half << _HALF_BITS).view(np.float32) if half else _ONE
        for i in range(BLOCK):
            codes[at + i] = np.float32(x_P[at + i] / divisor + _ROUNDING).view(np.int32)
    return largest  # type: ignore[return-value]


@kernel("void(int8[::1], uint16[::1], float32[::1], int64, int64, int64)")
def decode_blocks(
    codes: Array, scales: Array, out: Array, out_first: int, first: int, last: int
) -> None:
    """Write the values of blocks first .. last - 1 into `out`, which begins at `out_first`."""
    out, codes = _values(out, first - out_first, last - out_first), _values(codes, first, last)
    scales = scales[first:last]
    for block in range(scales.size):
        scale = np.int32(np.int32(scales[block]) << _HALF_BITS).view(np.float32)
        at = block * BLOCK
        for i in range(BLOCK):
            out[at + i] = np.float32(codes[at + i]) * scale


@kernel("boolean(int8[::1], uint16[::1], int64, int64)")
def are_valid(codes: Array, scales: Array, first: int, last: int) -> bool:
    """Whether no code of the blocks is -128, and each scale is +0 or within its bounds."""
    smallest = np.int8(0)
    for code in _values(codes, first, last):
        smallest = min(smallest, code)
    good = smallest > np.int8(-128)
    for bits in scales[first:last]:
        good &= bits == 0 or _SMALLEST_SCALE_BITS <= bits <= _LARGEST_SCALE_BITS
    return bool(good)
