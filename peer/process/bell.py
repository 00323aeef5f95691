"""A bell: tasks that wait for it go on each time it rings."""

import trio


class Bell:
    """Rings for those who wait at that moment; who comes later waits for the next time."""

    def __init__(self) -> None:
        self._next = trio.Event()

    def __repr__(self) -> str:
        return f"<Bell, {self._next.statistics().tasks_waiting} waiting>"

    def ring(self) -> None:
        """Wake all who wait."""
        rung, self._next = self._next, trio.Event()
        rung.set()

    async def wait(self) -> None:
        """Wait for the next time it rings."""
        await self._next.wait()
