"""The outer step through the codec's compiled loop, where it has one that fits (`int8_step`)."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from peer.codec import BLOCK, Codec
from peer.codec.compiled import in_chunks

WAY: Final = "noloco"
"""The name under which a codec's row has loops for this step (protocol/run/codecs.py)."""
MAX_MEMBERS: Final = 2
"""The loops know one of us alone, and a pair."""


def fused_step(
    phi_P: torch.Tensor,
    delta_P: torch.Tensor,
    theta_codes: Sequence[torch.Tensor],
    codec: Codec,
    alpha: float,
    beta: float,
) -> tuple[float, float] | None:
    """Step phi and delta in place, with gamma = beta; lengths and types are checked.

    Returns:
        The sums of squares of delta and of our values less the mean; None, and nothing done, where
        no compiled loop fits: another code, a short vector, a larger group, numba missing.
    """
    if len(theta_codes) > MAX_MEMBERS:
        return None
    fused = codec.fused_loops(WAY, theta_codes, (phi_P, delta_P))
    if fused is None:
        return None
    arrays = (
        *fused.codes[0],
        *fused.codes[-1],
        phi_P.detach().numpy(),
        delta_P.detach().numpy(),
        (np.float32(1 / len(theta_codes)), np.float32(alpha), np.float32(beta)),
    )
    sums = in_chunks(
        lambda first, last: fused.kernels.step_blocks(*arrays, first, last), phi_P.numel() // BLOCK
    )
    return sum(delta for delta, _ in sums), sum(distance for _, distance in sums)
