"""The data peers that are gone, and have left microbatches at a relay.

A link that breaks may be back in a moment, and with it the data peer, which waits for what is its
own. So one that is not there is taken for gone when it has been away for GONE_S. Its microbatches
need no slot then: nobody sends their gradients, and those of others wait for the slots.
"""

from collections.abc import Collection
from typing import Final

GONE_S: Final = 10.0
"""A data peer that loses a link to a relay sends what it had there another way at once."""


class Departed:
    """See the top of the file."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def look(self, origins: Collection[str], alive: Collection[str], now_s: float) -> set[str]:
        """The data peers that have left microbatches here, and will not come for them.

        Args:
            origins: those that have microbatches here.
            alive: all data peers that are there.
        """
        away = set(origins).difference(alive)
        self._since_s = {each: self._since_s.get(each, now_s) for each in away}
        return {each for each, since_s in self._since_s.items() if now_s - since_s >= GONE_S}
