"""What has come for a fragment and cannot be used yet: bounded, and the rest is lost and counted.

Results for sends to come are kept for MAX_EARLY_CYCLES cycles. A joiner does not know which its
first send will be; then the newest are kept. What could not be written because the trainer had just
sent the fragment waits for that send.
"""

from collections import defaultdict
from typing import Final

from .fragment_events import Fetched, ResultArrived

MAX_WAITING: Final = 4096
"""Items that wait for a send on its way."""
MAX_EARLY_CYCLES: Final = 2
"""Results for sends that we have not come to yet are kept this far ahead."""
MAX_EARLY_FOR_A_CHUNK: Final = 4
"""Results kept for a chunk in one cycle: views that differ make several owners of it."""


class WaitingResults:
    """See the top of the file.

    Attributes:
        lost_items: those that did not fit.
    """

    def __init__(self, num_chunks: int) -> None:
        self._max_early = MAX_EARLY_FOR_A_CHUNK * num_chunks
        self._early: dict[int, list[ResultArrived]] = defaultdict(list)
        self._for_send: list[ResultArrived | Fetched] = []
        self.lost_items = 0

    def keep_early(self, item: ResultArrived, cycle: int) -> None:
        """Keep a result for a send to come; the last was of `cycle`, or there was none (-1)."""
        if cycle >= 0 and item.result.cycle > cycle + MAX_EARLY_CYCLES:
            return
        early = self._early[item.result.cycle]
        if len(early) < self._max_early:
            early.append(item)
        else:
            self.lost_items += 1
        while len(self._early) > MAX_EARLY_CYCLES:
            del self._early[min(self._early)]

    def wait_for_send(self, item: ResultArrived | Fetched) -> None:
        """Keep what came while a send was on its way."""
        if len(self._for_send) < MAX_WAITING:
            self._for_send.append(item)
        else:
            self.lost_items += 1

    def due(self, cycle: int) -> list[ResultArrived | Fetched]:
        """Let go what came for this send, or an earlier one, before we were there."""
        for_send, self._for_send = self._for_send, []
        cycles = sorted(early for early in self._early if early <= cycle)
        return [*for_send, *(item for early in cycles for item in self._early.pop(early))]
