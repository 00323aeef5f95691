"""The eight magnitudes that a 4-bit code has, and what follows from them."""

import math
from dataclasses import dataclass
from typing import Final

import torch

from .base import BLOCK, LARGEST_MAGNITUDE
from .blocks import BlockFormat

_SMALLEST_NORMAL: Final = 2.0**-126
_BF16_DIGITS: Final = 8


@dataclass(frozen=True, slots=True)
class Grid:
    """Rising magnitudes in units of a block's scale; the first is 0.

    Each has at most three binary digits, so a magnitude times a bf16 scale, and a midpoint times
    it, are exact in fp32.
    """

    magnitudes: tuple[float, ...]

    @property
    def midpoints(self) -> tuple[float, ...]:
        """Halfway between two neighbours each; a value at a midpoint takes the smaller one."""
        pairs = zip(self.magnitudes, self.magnitudes[1:], strict=False)
        return tuple((low + high) / 2 for low, high in pairs)

    @property
    def signed(self) -> tuple[float, ...]:
        """What each of the 16 codes stands for; the eighth is not used."""
        return (*self.magnitudes, *(-magnitude for magnitude in self.magnitudes))

    @property
    def format(self) -> BlockFormat:
        """Scales such that the smallest midpoint is a normal number, and no value is too large."""
        return BlockFormat(
            code_bytes=BLOCK // 2,
            code_type=torch.uint8,
            largest_level=self.magnitudes[-1],
            smallest_scale=_SMALLEST_NORMAL / self.midpoints[0],
            largest_scale=_rounded_up(LARGEST_MAGNITUDE / self.magnitudes[-1]),
        )


def _rounded_up(scale: float) -> float:
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(math.ceil(math.ldexp(mantissa, _BF16_DIGITS)), exponent - _BF16_DIGITS)


INT4_GRID: Final = Grid((0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0))
E3M0_GRID: Final = Grid((0.0, *(2.0**exponent for exponent in range(-6, 1))))
