"""What waits for a task: bounded, filled without waiting, and its next item may be looked at."""

from contextlib import suppress
from typing import Generic, TypeVar

import trio

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """For one task that takes; who puts never waits.

    Attributes:
        lost_items: those that did not fit.
    """

    def __init__(self, max_items: int) -> None:
        self._put, self._take = trio.open_memory_channel[Item](max_items)
        self._looked_at: Item | None = None
        self.lost_items = 0

    def __repr__(self) -> str:
        return f"<Inbox of {self._take.statistics().current_buffer_used}, {self.lost_items} lost>"

    def put(self, item: Item) -> None:
        """What does not fit is lost, and counted."""
        try:
            self._put.send_nowait(item)
        except trio.WouldBlock:
            self.lost_items += 1

    async def receive(self) -> Item:
        """The next item."""
        if self._looked_at is None:
            return await self._take.receive()
        item, self._looked_at = self._looked_at, None
        return item

    def look(self) -> Item | None:
        """The next item, left where it is; None if there is none yet."""
        if self._looked_at is None:
            with suppress(trio.WouldBlock):
                self._looked_at = self._take.receive_nowait()
        return self._looked_at

    def drop(self) -> None:
        """Take away what was looked at."""
        self._looked_at = None
