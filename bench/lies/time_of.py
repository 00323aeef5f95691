"""The time of the defences, beside that of an exchange over a usual line.

Pairs: one pass over both vectors. Fragments: lengths of the contributions to the chunks that a peer
owns, which together are as long as one vector, and of all results, as long again. A round is never
shorter than its exchanges, so a share of an exchange is at most that share of a round.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from peer.averaging.gossip.outer_step import NolocoFactors, OuterState
from peer.codec import get_codec, root_mean_square

from .arms import PEERS, Way
from .pieces import Pieces, view_of

VALUES: Final = 4 << 20
LINE_BITS_PER_S: Final = 200e6
_REPEATS: Final = 5


@dataclass(frozen=True, slots=True)
class DefenceTime:
    """Seconds of the defences and of an exchange on the line."""

    defence_s: float
    exchange_s: float

    @property
    def share(self) -> float:
        """The first as a share of the second."""
        return self.defence_s / self.exchange_s


def time_of_defences(values: int = VALUES) -> Mapping[Way, DefenceTime]:
    """Both ways', for so many values in int8."""
    codec = get_codec("int8")
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, values, generator=generator)
    pieces = Pieces(codec, [values])
    ours, theirs = pieces.encoded(one), pieces.encoded(other)
    phi_P = np.zeros(values, np.float32)
    outer = OuterState(phi_P, phi_P.copy(), codec, NolocoFactors(0.3, 0.7, 0.7))
    seconds_on_line = 8 * pieces.code_bytes / LINE_BITS_PER_S
    in_pairs = _fastest(lambda: outer.distances(view_of(ours), view_of(theirs)))
    in_fragments = 2 * _fastest(lambda: root_mean_square(view_of(ours), codec, values))
    return {
        "pairs": DefenceTime(in_pairs, seconds_on_line),
        "fragments": DefenceTime(in_fragments, 2 * seconds_on_line * (PEERS - 1) / PEERS),
    }


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of some repeats, after one that loads what has to be loaded."""
    work()
    found = []
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - started_s)
    return min(found)
