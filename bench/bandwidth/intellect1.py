"""INTELLECT-1: what a real swarm's averages cost, and what ours would cost on its links.

Ten thousand million parameters, rounds of 100 inner steps that last about 38 minutes, then an
int8 ring all-reduce for which all wait. Reported are its median seconds and the compute utilisation
on three sets of sites; H t / (H t + all-reduce) is to agree.

The bandwidth is not reported. It follows from the seconds and the 2 (M - 1) / M bytes per parameter
that a ring of M peers sends; M = 14 is taken for all three, as for the widest. (Were it 4, they
would be a fifth less.)

Source: arXiv 2412.01152, table 2, as quoted by others; M from its bytes per token.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from .methods import INT8_BITS, keeping_rounds, waiting

ROUND_S: Final = 38 * 60.0
PARAMETERS: Final = 10e9
PEERS: Final = 14


@dataclass(frozen=True, slots=True)
class Site:
    """One row of the report.

    Attributes:
        all_reduce_s: median.
        reported: compute utilisation.
    """

    name: str
    all_reduce_s: float
    reported: float

    @property
    def counted(self) -> float:
        """Utilisation from the seconds."""
        return ROUND_S / (ROUND_S + self.all_reduce_s)

    @property
    def link_gbit_s(self) -> float:
        """What a peer's link must have carried in each direction."""
        return 2 * (PEERS - 1) / PEERS * PARAMETERS * 8 / 1e9 / self.all_reduce_s

    @property
    def noloco_s(self) -> float:
        """One int8 vector to a partner on the same link."""
        return INT8_BITS * PARAMETERS / 1e9 / self.link_gbit_s

    @property
    def noloco_waiting(self) -> float:
        """Utilisation if both wait for it."""
        link_gbit_s = np.array([self.link_gbit_s])
        return float(waiting(ROUND_S, INT8_BITS * PARAMETERS / 1e9, link_gbit_s)[0])

    @property
    def noloco(self) -> float:
        """Utilisation if both train on."""
        link_gbit_s = np.array([self.link_gbit_s])
        return float(keeping_rounds(ROUND_S, INT8_BITS * PARAMETERS / 1e9, link_gbit_s)[0])


SITES: Final = (
    Site("USA", 103, 0.957),
    Site("USA and Europe", 382, 0.856),
    Site("global", 469, 0.830),
)
WIDEST: Final = SITES[-1]
