"""NoLoCo, put together: gossip in pairs with its outer step."""

import numpy as np

from peer.averaging.gossip.outer_state import OuterState
from peer.averaging.gossip.pair_averaging import PairAveraging
from peer.averaging.parts import AveragingParts
from peer.codec import get_codec

from .outer_step import NolocoFactors


def averaging(parts: AveragingParts) -> PairAveraging:
    """NoLoCo with the factors of the run spec."""
    sync = parts.spec.sync
    # Not zeros_like, which writes them: memory that is never written is none.
    momentum_P = np.zeros(parts.slow_P.size, np.float32)
    factors = NolocoFactors(sync.alpha, sync.beta, sync.effective_gamma)
    outer = OuterState(parts.slow_P, momentum_P, get_codec(parts.held.codec), factors)
    return PairAveraging(parts, outer)
