"""Remembering who was linked, for the time after a restart (peer/state/acquaintances.py)."""

from contextlib import suppress
from typing import Final

import trio

from peer.ports import Work
from peer.state.acquaintances import Acquaintances
from protocol.membership.view import Roster

KEEP_EVERY_S: Final = 2.0


class KeepAcquaintances:
    """Writes down who is there, every so often."""

    def __init__(self, acquaintances: Acquaintances, roster: Roster, work: Work) -> None:
        self._acquaintances = acquaintances
        self._roster = roster
        self._work = work

    async def run(self) -> None:
        """Go on until cancelled. A disk that refuses costs what would have been remembered."""
        while True:
            await trio.sleep(KEEP_EVERY_S)
            with suppress(OSError):
                alive = self._roster.alive(trio.current_time())
                await self._work.run(self._acquaintances.keep, alive)
