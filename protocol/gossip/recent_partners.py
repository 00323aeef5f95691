"""How often each peer was our partner of late: none is to be everybody's all the time.

A peer that is always free, and chooses the numbers of its rounds so that it ranks first, would be
the partner of all in each round. So one that was partner MOST_FAIR_SHARES times as often as chance
would have it is put off. With a few peers that is never reached: there is nobody else.
"""

import math
from collections import deque
from typing import Final

RECENT: Final = 16
MOST_FAIR_SHARES: Final = 3


class RecentPartners:
    """The partners of the last RECENT exchanges."""

    def __init__(self) -> None:
        self._partners: deque[str] = deque(maxlen=RECENT)

    def add(self, peer_id: str) -> None:
        """A peer became our partner."""
        self._partners.append(peer_id)

    def is_too_often(self, peer_id: str, present: int) -> bool:
        """Whether a peer has had its share, among so many that may be partners."""
        most = max(2, math.ceil(MOST_FAIR_SHARES * RECENT / max(1, present)))
        return self._partners.count(peer_id) >= most
