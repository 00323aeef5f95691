"""The mean of a group's vectors, decoded, tile by tile."""

from collections.abc import Sequence

import torch

from peer.codec import Codec


def group_mean(
    group_codes: Sequence[torch.Tensor],
    codec: Codec,
    start: int,
    out_mean: torch.Tensor,
    out_own: torch.Tensor,
    scratch: torch.Tensor,
    shares: Sequence[float] | None = None,
) -> None:
    """Write the mean of the decoded values from `start` on, and the first member's own values.

    All three are fp32 [n]; values start .. start + n - 1 are read. The members weigh the same, or
    as `shares` says.
    """
    stop = start + out_mean.numel()
    weights = shares or [1.0 / len(group_codes)] * len(group_codes)
    codec.decode_range(group_codes[0], start, stop, out_own)
    torch.mul(out_own, weights[0], out=out_mean)
    for codes, weight in zip(group_codes[1:], weights[1:], strict=True):
        codec.decode_range(codes, start, stop, scratch)
        out_mean.add_(scratch.mul_(weight))
