"""How many pieces may be on their way at once over a line of which nobody knows what it carries.

Pieces that are sent at once over a thin line come at once too, and late: eight of them after eight
times as long as one alone. So a line begins with one piece. A second one that makes the first
slower shows no more of the line than one that does not, since it may be the other end that is thin:
so the number is not held down by what is slow, but grows with time as well. Pieces that did not
begin together do not end together, however many share the line later.

Rules
  1. One at first, and one more for each piece that has come through: a fast line has as many as may
     be within seconds. One more, too, for each MORE_EVERY_S: many slow ones fill a fast line.
  2. It begins anew with one after a piece was lost, which may have had too little of the line, and
     where nothing was on its way for MORE_EVERY_S.
"""

import math
from typing import Final

MORE_EVERY_S: Final = 30.0
"""A piece of the usual 4 MiB alone takes about so long over a line of 1 Mbit/s."""


class AtOnce:
    """See the top of the file.

    Args:
        at_most: however fast the line is.
    """

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._under_way = 0
        self._came = 0
        self._since_s = 0.0
        self._last_s = -math.inf

    def limit(self, now_s: float) -> int:
        """How many may be on their way now."""
        if self._is_idle(now_s):
            return 1
        return min(self._at_most, 1 + self._came + int((now_s - self._since_s) // MORE_EVERY_S))

    def has_room(self, now_s: float) -> bool:
        """Whether a further one may begin."""
        return self._under_way < self.limit(now_s)

    def began(self, now_s: float) -> None:
        """A piece is on its way."""
        if self._is_idle(now_s):
            self._restart(now_s)
        self._under_way += 1

    def came(self, now_s: float) -> None:
        """A piece has come through."""
        self._ended(now_s)
        self._came = min(self._at_most, self._came + 1)

    def refused(self, now_s: float) -> None:
        """A piece was not sent, which says nothing of the line."""
        self._ended(now_s)

    def lost(self, now_s: float) -> None:
        """A piece was cut off."""
        self._ended(now_s)
        self._restart(now_s)

    def _ended(self, now_s: float) -> None:
        self._under_way -= 1
        self._last_s = now_s

    def _restart(self, now_s: float) -> None:
        self._came, self._since_s = 0, now_s

    def _is_idle(self, now_s: float) -> bool:
        return not self._under_way and now_s - self._last_s >= MORE_EVERY_S
