"""GASLoC, put together: gossip in pairs with its outer step."""

import numpy as np

from peer.averaging.gossip.outer_state import OuterState
from peer.averaging.gossip.pair_averaging import PairAveraging
from peer.averaging.parts import AveragingParts
from peer.codec import get_codec

from .outer_step import LookAhead


def averaging(parts: AveragingParts) -> PairAveraging:
    """GASLoC with the momentum of the run spec."""
    gasloc = parts.spec.sync.gasloc
    assert gasloc is not None
    buffer_P = np.zeros_like(parts.slow_P)
    codec, rule = get_codec(parts.held.codec), LookAhead(gasloc.momentum)
    return PairAveraging(parts, OuterState(parts.slow_P, buffer_P, codec, rule))
