"""What the compiled loops of all codes of blocks share; it becomes part of those that call it.

For numbers that are not negative, the order of fp32 values is the order of their bits as integers,
with infinity and then NaN above all: the largest magnitude of a block, and whether all is finite,
is one maximum of integers.

Importing this file needs numba.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .base import BLOCK
from .compiled import helper

Array = npt.NDArray[Any]
Integer = int | np.integer[Any]

MAGNITUDE_BITS: Final = np.int32(0x7FFFFFFF)
HALF_BITS: Final = np.int32(16)
_LOW_HALF: Final = np.int32(0xFFFF)


@helper()
def values_of(array: Array, first: int, last: int) -> Array:
    """The values of blocks first .. last - 1.

    Loops over them count from 0, so LLVM makes vectors of them: an index that it cannot tell from a
    negative one would mean the end of the array.
    """
    return array[first * BLOCK : last * BLOCK]


@helper(as_text=True)
def largest_bits(x_bits: Array, at: int) -> np.int32:
    """The bits of the largest magnitude in the block that begins at `at`."""
    top = np.int32(0)
    for i in range(BLOCK):
        top = max(top, x_bits[at + i] & MAGNITUDE_BITS)
    return top


@helper()
def scale_of(top: np.int32, largest_level: np.float32, smallest_scale: np.float32) -> np.int32:
    """The bits of the bf16 scale of a block whose largest magnitude has the bits `top`."""
    scale = np.float32(np.int32(top).view(np.float32) / largest_level)
    if scale < smallest_scale:
        return np.int32(0)
    return np.int32((scale.view(np.int32) + _LOW_HALF) >> HALF_BITS)


@helper()
def scale_from(half: Integer) -> np.float32:
    """The scale of these bits, as fp32."""
    return np.int32(np.int32(half) << HALF_BITS).view(np.float32)


@helper()
def are_scales_valid(scales: Array, smallest_bits: Integer, largest_bits: Integer) -> bool:
    """Whether each scale is +0 or within its bounds."""
    good = True
    for bits in scales:
        good &= bits == 0 or smallest_bits <= bits <= largest_bits
    return good
