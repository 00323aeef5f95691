"""How much of something may pass: so much a second, and a burst of it at once.

Beyond that nobody is refused: what comes next has to wait, and how long is told. Where a peer's
messages are read at such a pace, its flood piles up on its own line.
"""


class Allowance:
    """A bucket that fills with time.

    Args:
        per_s: what may pass each second.
        burst: what may pass at once.
    """

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._at_s: float | None = None

    def spend(self, now_s: float, cost: float) -> float:
        """Let `cost` pass now; for how many seconds nothing more should."""
        if self._at_s is not None:
            self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        self._left -= cost
        return max(0.0, -self._left / self._per_s)
