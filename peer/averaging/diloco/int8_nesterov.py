"""The outer step of DiLoCo and the sum of its average on int8 codes, one pass over memory each.

Codes become values and all that follows in registers, through the very operations of the plain way
(nesterov.py) in their order, so the results are the same to the last bit.

Importing this file compiles it; go through `peer.codec.compiled.kernels_of`.
"""

import numpy as np

from peer.codec import BLOCK
from peer.codec.compiled import kernel
from peer.codec.int8_kernels import Array, scale_from, values_of


@kernel(
    "void(int8[::1], uint16[::1], float32[::1], float32[::1], float32[::1], float32[::1],"
    " UniTuple(float32, 2), boolean, int64, int64)"
)
def step_blocks(
    codes: Array,
    scales: Array,
    phi_C: Array,
    v_C: Array,
    new_phi_C: Array,
    new_v_C: Array,
    factors: tuple[np.float32, np.float32],
    keep: bool,
    first: int,
    last: int,
) -> None:
    """Step blocks first .. last - 1 from one state to another, or in place.

    Args:
        factors: learning rate and momentum.
        keep: the state is in `new_phi_C` and `new_v_C`, and is first copied to the others.
    """
    learning_rate, momentum = factors
    codes, scales = values_of(codes, first, last), scales[first:last]
    phi_C, v_C = values_of(phi_C, first, last), values_of(v_C, first, last)
    new_phi_C, new_v_C = values_of(new_phi_C, first, last), values_of(new_v_C, first, last)
    for block in range(scales.size):
        scale = scale_from(scales[block])
        at = block * BLOCK
        if keep:
            for i in range(BLOCK):
                phi_C[at + i] = new_phi_C[at + i]
                v_C[at + i] = new_v_C[at + i]
        for i in range(BLOCK):
            D = np.float32(codes[at + i]) * scale
            v = v_C[at + i] * momentum + D
            new_v_C[at + i] = v
            new_phi_C[at + i] = phi_C[at + i] - (v * momentum + D) * learning_rate


@kernel("void(int8[::1], uint16[::1], float32[::1], float32, int64, int64)")
def add_blocks(
    codes: Array, scales: Array, mean: Array, share: np.float32, first: int, last: int
) -> None:
    """Add a share of the values of blocks first .. last - 1 to `mean`, which begins at `first`."""
    codes, scales = values_of(codes, first, last), scales[first:last]
    for block in range(scales.size):
        scale = scale_from(scales[block])
        at = block * BLOCK
        for i in range(BLOCK):
            mean[at + i] += np.float32(codes[at + i]) * scale * share
