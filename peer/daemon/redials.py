"""When each peer may be dialled again: later after every attempt, at once after a life together.

What is kept is bounded: a time that has come is forgotten, and so is the patience with a peer that
the view has forgotten.
"""

import math
from collections.abc import Container
from typing import Final

from peer.ports import PeerId

REDIAL_FIRST_S: Final = 0.5
REDIAL_MAX_S: Final = 30.0


class Redials:
    """The back-off of each peer.

    Args:
        attempt_s: how long one attempt may take.
    """

    def __init__(self, attempt_s: float) -> None:
        self._attempt_s = attempt_s
        self._backoff_s: dict[PeerId, float] = {}
        self._not_before_s: dict[PeerId, float] = {}

    def __repr__(self) -> str:
        return f"<Redials of {len(self._backoff_s)}, {len(self._not_before_s)} put off>"

    def linked(self, peer_id: PeerId) -> None:
        """It has answered."""
        self._backoff_s.pop(peer_id, None)

    def lost(self, peer_id: PeerId, now_s: float) -> None:
        """Its link has ended; whoever is there again is dialled soon."""
        self._not_before_s[peer_id] = now_s + REDIAL_FIRST_S

    def left(self, peer_id: PeerId, now_s: float) -> None:
        """It went on purpose."""
        self._not_before_s[peer_id] = now_s + REDIAL_MAX_S

    def is_due(self, peer_id: PeerId, now_s: float) -> bool:
        """Whether it may be dialled now."""
        return now_s >= self._not_before_s.get(peer_id, now_s)

    def dialled(self, peer_id: PeerId, now_s: float) -> None:
        """An attempt begins."""
        backoff_s = self._backoff_s.get(peer_id, REDIAL_FIRST_S)
        self._backoff_s[peer_id] = min(REDIAL_MAX_S, 2 * backoff_s)
        self._not_before_s[peer_id] = now_s + self._attempt_s + backoff_s

    def failed(self, peer_id: PeerId, now_s: float) -> None:
        """An attempt has ended without a link, sooner perhaps than it might have."""
        after_it_s = self._not_before_s.get(peer_id, math.inf)
        soon_s = now_s + self._backoff_s.get(peer_id, REDIAL_FIRST_S)
        self._not_before_s[peer_id] = min(after_it_s, soon_s)

    def forget(self, now_s: float, known: Container[PeerId]) -> None:
        """Drop what says nothing any more: times that have come, peers that are not known."""
        self._not_before_s = {p: at_s for p, at_s in self._not_before_s.items() if at_s > now_s}
        self._backoff_s = {p: s for p, s in self._backoff_s.items() if p in known}
