"""How far the outputs of two snapshots are apart: two models, one fixed batch of held-out tokens.

Theory. Weights that are far apart may compute the same (permuted neurons, scales that cancel), and
weights that are near may not. What counts is the distribution over the next token. For two of them,
p and q, with m = (p + q) / 2, the Jensen-Shannon divergence is

    JS(p, q) = KL(p || m) / 2 + KL(q || m) / 2

in nats: symmetric, 0 if and only if p = q, at most ln 2 (no token is likely for both), and finite
for whatever finite logits there are, which KL(p || q) is not. It is averaged over the positions of
the probe batch: the first tokens of the first validation blocks, the same for all peers of a run,
and never trained on.

Both snapshots are taken as their codes say, ours too: what rounding does to one it does to the
other. The fast weights wait in the idle gradient, and are bit for bit the same afterwards.
"""

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from .device import is_out_of_memory
from .errors import WrongCommand
from .snapshot import Snapshots
from .weights import FastWeights, set_aside

PROBE_BLOCKS: Final = 4
PROBE_TOKENS: Final = 64
"""Positions of each block; with all blocks 256, of which no one weighs more than another."""


def probe_batch(validation_BT: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The tokens that outputs are compared on: [b, t], from [B, T+1] held-out ones."""
    return validation_BT[:PROBE_BLOCKS, : min(PROBE_TOKENS, validation_BT.shape[1] - 1)]


def jensen_shannon(own_NV: torch.Tensor, other_NV: torch.Tensor) -> float | None:
    """Mean divergence of two batches of distributions, given by logits; None if it is no number."""
    own, other = (functional.log_softmax(x.float(), dim=-1) for x in (own_NV, other_NV))
    # log(p / m) = ln 2 - log(1 + q / p): just 0 where p = q.
    from_own, from_other = (
        math.log(2) - functional.softplus(ratio) for ratio in (other - own, own - other)
    )
    js_N = (own.exp() * from_own + other.exp() * from_other).sum(-1) / 2
    divergence = float(js_N.mean(dtype=torch.float64))
    # Rounding may leave a hair of either side of the bounds.
    return min(max(divergence, 0.0), math.log(2)) if math.isfinite(divergence) else None


def output_divergence(
    model: FastWeights, snapshots: object, round_: int, outputs: Callable[[], torch.Tensor | None]
) -> float | None:
    """Mean divergence of the outputs of the pending snapshot and of the partner's.

    Args:
        snapshots: of averaging in pairs; others have no partner.
        outputs: of the fast weights that are in place: logits, [N, V]; None where others have them.

    Returns:
        None where it is no number, there are no outputs, or memory does not suffice.

    Raises:
        WrongCommand: no snapshot of this round is pending.
    """
    pending = snapshots.pending if isinstance(snapshots, Snapshots) else None
    if not isinstance(snapshots, Snapshots) or pending is None or pending.round != round_:
        raise WrongCommand(f"Compare({round_}), but {pending or 'nothing'} is pending")
    try:
        with set_aside(model) as theta_P:
            snapshots.put_own(theta_P)
            own_NV = outputs()
            snapshots.put_partner(theta_P)
            other_NV = outputs()
            if own_NV is None or other_NV is None:
                return None
            return jensen_shannon(own_NV, other_NV)
    except (RuntimeError, MemoryError) as error:  # a health metric is no reason to end a trainer
        if not is_out_of_memory(error):
            raise
        return None
