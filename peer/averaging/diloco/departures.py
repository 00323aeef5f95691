"""The order in which fragments leave that the trainer has sent together.

An owner averages a fragment as soon as it has the contributions of all to it. So all peers should
contribute to the same one first, but tasks that wake together run in an order of chance, another at
each peer. A fragment that does not come soon is waited for no longer: its keeper may be busy.
"""

from typing import Final

import trio

WAIT_S: Final = 0.5
"""Time that a fragment waits for those that were sent before it."""


class Departures:
    """Fragments that were sent, and have not left."""

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._left = trio.Event()

    def __repr__(self) -> str:
        return f"<Departures of {self._waiting}>"

    def sent(self, fragment: int) -> None:
        """Note that a fragment is to leave, after those that were sent before."""
        self._waiting.append(fragment)

    async def turn(self, fragment: int) -> None:
        """Wait for those before it."""
        with trio.move_on_after(WAIT_S):
            while fragment in self._waiting and self._waiting[0] != fragment:
                await self._left.wait()

    def left(self, fragment: int) -> None:
        """Note that a fragment is on its way."""
        if fragment in self._waiting:
            self._waiting.remove(fragment)
        self._left.set()
        self._left = trio.Event()
