"""What is going to happen, in virtual time: the earliest first, of equal ones the oldest."""

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class Agenda:
    """Runs actions when they are due.

    Attributes:
        now_s: the virtual time.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._count = itertools.count()

    def after(self, delay_s: float, action: Action) -> None:
        """Do this so much later."""
        heapq.heappush(self._heap, (self.now_s + max(0.0, delay_s), next(self._count), action))

    def run(self, until_s: float) -> None:
        """Do everything that is due until then."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
        self.now_s = until_s
