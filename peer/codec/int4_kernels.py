"""The int4 code (`peer.codec.codecs`) as compiled loops over blocks.

A value's level is the number of midpoints, times the scale, that its magnitude is beyond, counted
in fp32: seven comparisons, no division and no branch, so LLVM vectorizes them. Adding 2**23 to a
byte as fp32 leaves it in the lowest bits of the sum.

Importing this file compiles it; go through `peer.codec.compiled.kernels_of`.
"""

from typing import Final

import numpy as np

from . import BLOCK
from .codecs import HALF, LEVELS, MIDPOINTS, Int4Codec
from .compiled import helper, kernel
from .int8_kernels import Array, are_scales_valid, largest_bits, scale_from, scale_of, values_of

_LEVELS: Final = np.array(LEVELS, np.float32)
_MIDPOINTS: Final = tuple(np.float32(midpoint) for midpoint in MIDPOINTS)
_LARGEST_LEVEL: Final = np.float32(Int4Codec.largest_level)
_SMALLEST_SCALE: Final = np.float32(Int4Codec.smallest_scale)
_SMALLEST_SCALE_BITS: Final = np.uint16(_SMALLEST_SCALE.view(np.uint32) >> 16)
_LARGEST_SCALE_BITS: Final = np.uint16(np.float32(Int4Codec.largest_scale).view(np.uint32) >> 16)
_LOW: Final = np.uint8(0x0F)
_HIGH: Final = np.uint8(0xF0)
_LOW_UNUSED: Final = np.uint8(0x08)
_HIGH_UNUSED: Final = np.uint8(0x80)
_FOUR: Final = np.uint8(4)
_NO: Final = np.float32(0)
_ONE: Final = np.float32(1)
_NEGATIVE: Final = np.float32(8)
_HIGH_NIBBLE: Final = np.float32(16)
_NARROWING: Final = np.float32(2**23)


@helper()
def _codes_of(array: Array, first: int, last: int) -> Array:
    return array[first * HALF : last * HALF]


@helper()
def _nibble(x: np.float32, m: tuple[np.float32, ...]) -> np.float32:
    """The code of x, given the midpoints times the scale; below the first, no sign either."""
    size = abs(x)
    place = (
        (_ONE if size > m[0] else _NO)
        + (_ONE if size > m[1] else _NO)
        + (_ONE if size > m[2] else _NO)
        + (_ONE if size > m[3] else _NO)
        + (_ONE if size > m[4] else _NO)
        + (_ONE if size > m[5] else _NO)
        + (_ONE if size > m[6] else _NO)
    )
    return place + (_NEGATIVE if x < -m[0] else _NO)


@kernel("int32(float32[::1], int32[::1], uint8[::1], uint16[::1], int64, int64)")
def encode_blocks(
    x_P: Array, x_bits: Array, codes: Array, scales: Array, first: int, last: int
) -> int:
    largest = np.int32(0)
    x_P, x_bits = values_of(x_P, first, last), values_of(x_bits, first, last)
    codes, scales = _codes_of(codes, first, last), scales[first:last]
    g0, g1, g2, g3, g4, g5, g6 = _MIDPOINTS
    for block in range(scales.size):
        at, code_at = block * BLOCK, block * HALF
        top = largest_bits(x_bits, at)
        largest = max(largest, top)
        half = scale_of(top, _LARGEST_LEVEL, _SMALLEST_SCALE)
        scales[block] = half
        s = scale_from(half) if half else _ONE
        m = (g0 * s, g1 * s, g2 * s, g3 * s, g4 * s, g5 * s, g6 * s)
        for i in range(HALF):
            low, high = _nibble(x_P[at + i], m), _nibble(x_P[at + HALF + i], m)
            codes[code_at + i] = np.float32(low + _HIGH_NIBBLE * high + _NARROWING).view(np.int32)
    return largest  # type: ignore[return-value]


@kernel("void(uint8[::1], uint16[::1], float32[::1], int64, int64, int64)")
def decode_blocks(
    codes: Array, scales: Array, out: Array, out_first: int, first: int, last: int
) -> None:
    out, codes = values_of(out, first - out_first, last - out_first), _codes_of(codes, first, last)
    scales = scales[first:last]
    for block in range(scales.size):
        scale = scale_from(scales[block])
        at, code_at = block * BLOCK, block * HALF
        for i in range(HALF):
            pair = codes[code_at + i]
            out[at + i] = _LEVELS[pair & _LOW] * scale
            out[at + HALF + i] = _LEVELS[pair >> _FOUR] * scale


@kernel("boolean(uint8[::1], uint16[::1], int64, int64)")
def are_valid(codes: Array, scales: Array, first: int, last: int) -> bool:
    """Whether no code of the blocks is the unused one, and each scale is +0 or within bounds."""
    good = True
    for pair in _codes_of(codes, first, last):
        good &= (pair & _LOW) != _LOW_UNUSED and (pair & _HIGH) != _HIGH_UNUSED
    return bool(
        good and are_scales_valid(scales[first:last], _SMALLEST_SCALE_BITS, _LARGEST_SCALE_BITS)
    )
