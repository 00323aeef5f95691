"""The outer step on int8 codes as one compiled loop (`peer.codec.compiled`): one pass over memory.

It covers nearly every step: one of us or a pair, with gamma = beta. The plain step needs a dozen
passes over a tile; here codes become values, their mean, the new momentum and the new slow weights
in registers. Each value goes through the operations of the plain step in their order, so phi and
delta come out the same to the last bit. Sums of squares are of fp32 within a block and fp64 between
blocks, which is more exact than the plain step's. With alpha = 0 the move of phi stays in a block
of scratch, and delta is neither read nor written.

Importing this file compiles it; go through `peer.codec.compiled.kernels_of`.
"""

import numpy as np

from peer.codec import BLOCK
from peer.codec.compiled import helper, kernel
from peer.codec.int8_kernels import Array, scale_from, values_of


@helper(any_order=True)
def _squares(values: Array) -> np.float32:
    """Sum of squares of a block, in whatever order is fast; the licence ends with this function."""
    total = np.float32(0)
    for i in range(BLOCK):
        total += values[i] * values[i]
    return total


@kernel(
    "float64(int8[::1], uint16[::1], int8[::1], uint16[::1], float32[::1],"
    " float32[::1], UniTuple(float32, 3), int64, int64)"
)
def step_blocks(
    own_codes: Array,
    own_scales: Array,
    other_codes: Array,
    other_scales: Array,
    phi_P: Array,
    delta_P: Array,
    factors: tuple[np.float32, np.float32, np.float32],
    first: int,
    last: int,
) -> float:
    """Step blocks first .. last - 1.

    Args:
        factors: one over the number of members (alone: 1, and the other's codes are not read),
            alpha and beta.

    Returns:
        The sum of squares of our values less the mean.
    """
    share, alpha, beta = factors
    distance_squares = 0.0
    apart, pair = np.zeros(BLOCK, np.float32), share < np.float32(1)
    move, remembers = np.zeros(BLOCK, np.float32), alpha != np.float32(0)
    own_codes, other_codes = values_of(own_codes, first, last), values_of(other_codes, first, last)
    phi_P, delta_P = values_of(phi_P, first, last), values_of(delta_P, first, last)
    own_scales, other_scales = own_scales[first:last], other_scales[first:last]
    for block in range(last - first):
        at = block * BLOCK
        phi = phi_P[at : at + BLOCK]
        delta = delta_P[at : at + BLOCK] if remembers else move
        if not remembers:
            move[:] = np.float32(0)  # of the block before
        own_scale = scale_from(own_scales[block])
        if pair:
            other_scale = scale_from(other_scales[block])
            for i in range(BLOCK):
                own = np.float32(own_codes[at + i]) * own_scale
                mean = own * share + np.float32(other_codes[at + i]) * other_scale * share
                apart[i] = own - mean
                delta[i] = delta[i] * alpha + (mean - phi[i]) * beta
                phi[i] += delta[i]
            distance_squares += float(_squares(apart))
        else:
            for i in range(BLOCK):
                mean = np.float32(own_codes[at + i]) * own_scale
                delta[i] = delta[i] * alpha + (mean - phi[i]) * beta
                phi[i] += delta[i]
    return distance_squares


@kernel("UniTuple(float64, 2)(int8[::1], uint16[::1], int8[::1], uint16[::1], int64, int64)")
def distance_blocks(
    own_codes: Array,
    own_scales: Array,
    other_codes: Array,
    other_scales: Array,
    first: int,
    last: int,
) -> tuple[float, float]:
    """The sums of squares of our values less theirs, and of ours, of blocks first .. last - 1."""
    distance_squares = own_squares = 0.0
    ours, apart = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
    own_codes, other_codes = values_of(own_codes, first, last), values_of(other_codes, first, last)
    own_scales, other_scales = own_scales[first:last], other_scales[first:last]
    for block in range(last - first):
        at = block * BLOCK
        own_scale = scale_from(own_scales[block])
        other_scale = scale_from(other_scales[block])
        for i in range(BLOCK):
            own = np.float32(own_codes[at + i]) * own_scale
            ours[i] = own
            apart[i] = own - np.float32(other_codes[at + i]) * other_scale
        distance_squares += float(_squares(apart))
        own_squares += float(_squares(ours))
    return distance_squares, own_squares
