"""The outer step through a compiled loop (`int8_step`), where one fits; else the caller's own."""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from peer.codec import BLOCK, Codec
from peer.codec.blocks_compiled import scale_bits
from peer.codec.compiled import in_chunks, kernels_of
from peer.codec.int8 import Int8Codec, split


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
    kernels = _kernels(phi_P, delta_P, theta_codes, codec)
    if kernels is None:
        return None
    arrays = (
        *_arrays(theta_codes[0]),
        *_arrays(theta_codes[-1]),
        phi_P.detach().numpy(),
        delta_P.detach().numpy(),
        (np.float32(1 / len(theta_codes)), np.float32(alpha), np.float32(beta)),
    )
    sums = in_chunks(
        lambda first, last: kernels.step_blocks(*arrays, first, last), phi_P.numel() // BLOCK
    )
    return sum(delta for delta, _ in sums), sum(distance for _, distance in sums)


def _kernels(
    phi_P: torch.Tensor, delta_P: torch.Tensor, theta_codes: Sequence[torch.Tensor], codec: Codec
) -> ModuleType | None:
    if not isinstance(codec, Int8Codec) or len(theta_codes) > 2:
        return None
    scales = (split(codes)[1] for codes in theta_codes)
    if not codec.is_compiled_for(phi_P.numel(), phi_P, delta_P, *scales):
        return None
    return kernels_of("peer.averaging.noloco.int8_step")


def _arrays(codes: torch.Tensor) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.uint16]]:
    codes_P, scales = split(codes)
    return codes_P.numpy(), scale_bits(scales)
