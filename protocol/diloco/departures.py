"""The order in which fragments leave that the trainer has sent together.

An owner averages a fragment as soon as it has the contributions of all to it. So all peers should
contribute to the same one first, but the checks before it end in an order of chance, another at
each peer. A fragment that does not come soon is waited for no longer than WAIT_S: its keeper may be
busy.
"""

from typing import Final

WAIT_S: Final = 0.5
"""Time that a fragment waits for those that were sent before it."""


class Departures:
    """Fragments that were sent, and have not left."""

    def __init__(self) -> None:
        self._waiting: list[int] = []

    @property
    def first(self) -> int | None:
        """The fragment whose turn it is; None if none waits."""
        return self._waiting[0] if self._waiting else None

    def sent(self, fragment: int) -> None:
        """Note that a fragment is to leave, after those that were sent before."""
        self._waiting.append(fragment)

    def is_turn(self, fragment: int) -> bool:
        """Whether none that was sent before it is still here."""
        return fragment not in self._waiting or self._waiting[0] == fragment

    def left(self, fragment: int) -> None:
        """Note that a fragment is on its way."""
        if fragment in self._waiting:
            self._waiting.remove(fragment)
