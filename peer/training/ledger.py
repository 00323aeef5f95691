"""Time of a trainer by its use: each moment counts for one thing.

So the parts add up to the time that has passed; what nobody names is training.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protocol.trainer_messages import Into


class Ledger:
    def __init__(self, clock_s: Callable[[], float]) -> None:
        self.clock_s = clock_s
        self._into = Into.TRAIN
        self._since_s = clock_s()
        self._spent_s = dict.fromkeys(Into, 0.0)

    @contextmanager
    def on(self, into: Into) -> Iterator[None]:
        """Count what passes inside for this, and for nothing around it."""
        before, self._into = self._turn(), into
        try:
            yield
        finally:
            self._turn()
            self._into = before

    def taken(self) -> dict[Into, float]:
        """What has passed since the last call."""
        self._turn()
        taken, self._spent_s = self._spent_s, dict.fromkeys(Into, 0.0)
        return taken

    def _turn(self) -> Into:
        """Count until now. Returns for what."""
        now_s = self.clock_s()
        self._spent_s[self._into] += now_s - self._since_s
        self._since_s = now_s
        return self._into
