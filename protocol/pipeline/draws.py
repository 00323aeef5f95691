"""Seeded draws: the same numbers on every machine, for a search that all peers run alike.

The generator is SplitMix64 (Steele, Lea and Flood 2014): a counter, mixed. It is no secret and
need not be hard to guess.
"""

from collections.abc import Sequence
from typing import Final, TypeVar

import blake3

T = TypeVar("T")
_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15
_MIX: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Draws:
    """A stream of draws, named by its seed."""

    def __init__(self, seed: str) -> None:
        self._state = int.from_bytes(blake3.blake3(seed.encode()).digest(length=8), "big")

    def below(self, bound: int) -> int:
        """An integer from 0 to bound - 1; with bounds far below 2^64 none is likelier."""
        self._state = (self._state + _STEP) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * _MIX[0]) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * _MIX[1]) & _MASK
        return (mixed ^ (mixed >> 31)) % bound

    def of(self, choices: Sequence[T]) -> T:
        """One of several, each as likely."""
        return choices[self.below(len(choices))]
