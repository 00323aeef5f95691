"""Peers that could not be reached rest for a while, twice as long each further time.

Bounded: what is over is forgotten, and a peer that never answers again keeps one entry until its
rest has lasted REST_MAX_S and one more (the view is bounded, and only peers of it are asked).
"""

from typing import Final

REST_FIRST_S: Final = 30.0
REST_MAX_S: Final = 600.0


class Resting:
    """Peers that are not asked for now."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        self._rest_s: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Resting {len(self._until_s)}>"

    def failed(self, peer_id: str, now_s: float) -> None:
        """It could not be reached, or gave no answer."""
        rest_s = self._rest_s.get(peer_id, REST_FIRST_S)
        self._until_s[peer_id] = now_s + rest_s
        self._rest_s[peer_id] = min(REST_MAX_S, 2 * rest_s)

    def answered(self, peer_id: str) -> None:
        """It can be reached."""
        self._until_s.pop(peer_id, None)
        self._rest_s.pop(peer_id, None)

    def is_resting(self, peer_id: str, now_s: float) -> bool:
        """Whether it is not asked now."""
        return now_s < self._until_s.get(peer_id, now_s)

    def keep_only(self, now_s: float) -> None:
        """Forget what has long been over."""
        old = [peer_id for peer_id, at_s in self._until_s.items() if now_s > at_s + REST_MAX_S]
        for peer_id in old:
            self.answered(peer_id)
