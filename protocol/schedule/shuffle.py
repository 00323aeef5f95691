"""Keyed permutations of any number of things, computed where they are needed and stored nowhere.

A Feistel network over the smallest power of two that holds all values, with cycle walking: a value
outside is sent through again. Source: Black and Rogaway 2002.
"""

from typing import Any, Final

import blake3
import numpy as np
import numpy.typing as npt

Int64Vector = npt.NDArray[np.int64]
UInt64Vector = npt.NDArray[np.uint64]

FEISTEL_ROUNDS: Final = 8


def permuted(
    values: Int64Vector, size: Int64Vector | int, largest: int, key: str, tweak: UInt64Vector | None
) -> Int64Vector:
    """Where each value goes in a permutation of [0, size); int64 [n] to int64 [n].

    Args:
        size: of all, or of each value's own permutation.
        largest: the largest size there is.
        tweak: tells the permutations of one key apart, value by value; None where there is one.
    """
    bits = (largest - 1).bit_length()
    rounds = digest_words(key, FEISTEL_ROUNDS)
    tweaks = None if tweak is None else splitmix64(tweak)
    sizes = np.broadcast_to(np.asarray(size, np.uint64), values.shape)
    found = values.astype(np.uint64)
    todo = np.arange(len(found))
    while len(todo):
        found[todo] = _feistel(found[todo], bits, rounds, None if tweaks is None else tweaks[todo])
        todo = todo[found[todo] >= sizes[todo]]
    return found.astype(np.int64)


def uniform(hashed: UInt64Vector) -> npt.NDArray[np.float64]:
    """53 bits of each hash as a number strictly between 0 and 1."""
    return ((hashed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def splitmix64(x: UInt64Vector) -> UInt64Vector:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection that mixes all bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def digest_words(text: str, count: int) -> UInt64Vector:
    """The first `count` little-endian words of a digest; uint64 [count]."""
    digest = blake3.blake3(text.encode()).digest(length=8 * count)
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def _feistel(
    values: UInt64Vector, bits: int, rounds: UInt64Vector, tweaks: UInt64Vector | None
) -> UInt64Vector:
    """A keyed bijection of [0, 2^bits): the halves take turns in masking each other."""
    right_bits = np.uint64(bits // 2)
    right_mask = (np.uint64(1) << right_bits) - np.uint64(1)
    left_mask = (np.uint64(1) << np.uint64(bits - bits // 2)) - np.uint64(1)
    left, right = values >> right_bits, values & right_mask
    for number, word in enumerate(rounds):
        key: Any = word if tweaks is None else word ^ tweaks
        if number % 2:
            right = right ^ (splitmix64(left ^ key) & right_mask)
        else:
            left = left ^ (splitmix64(right ^ key) & left_mask)
    return (left << right_bits) | right
