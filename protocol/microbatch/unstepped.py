"""Gradients that relays have added, and may not have stepped with: gone, if such a relay dies.

A relay steps with an iteration's gradients before it takes a microbatch of the next; so what has
come through it in a later iteration says that it has stepped with those before.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable


class Unstepped:
    """See the top of the file."""

    def __init__(self) -> None:
        self._added: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def add(self, path: Iterable[str], iteration: int) -> None:
        """These relays have added a microbatch of that iteration."""
        for relay in path:
            added = self._added[relay]
            added[iteration] += 1
            for before in [each for each in added if each < iteration]:
                del added[before]

    def pop(self, relay: str) -> int:
        """A relay is gone: how many gradients have gone with it."""
        return sum(self._added.pop(relay, Counter()).values())

    def forget_before(self, iteration: int) -> None:
        """Nothing of earlier iterations can be gone."""
        for relay in list(self._added):
            added = self._added[relay]
            for before in [each for each in added if each < iteration]:
                del added[before]
            if not added:
                del self._added[relay]
