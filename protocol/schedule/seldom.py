"""How often something may be measured that costs time: so seldom that its share stays small.

Theory. Each measurement is paid for by time that passes without another one: after one that took c
seconds, none is due for c / share seconds. Then all of them together, each with the wait that
follows it, take at most that share of the time, however much their costs vary and whatever the
machine does meanwhile. There is no average to be fooled, and nothing is saved up: after a long
quiet time one is due, not many.

The first one has no predecessor to learn from. It waits as if one had been made at the start that
cost what is expected; so a short run makes none.
"""


class Seldom:
    """See the top of the file. Times are in seconds.

    Args:
        share: of the time that may be spent, above 0.
        since_s: when waiting began.
    """

    def __init__(self, share: float, since_s: float) -> None:
        self._share = share
        self._since_s = since_s
        self._cost_s: float | None = None

    def __repr__(self) -> str:
        return f"<Seldom {self._share:.1%} since {self._since_s:.1f} s, cost {self._cost_s}>"

    def is_due(self, now_s: float, expected_s: float) -> bool:
        """Whether the next one may be made.

        Args:
            expected_s: what one costs, as long as none was made.
        """
        cost_s = expected_s if self._cost_s is None else self._cost_s
        return now_s - self._since_s >= cost_s / self._share

    def made(self, now_s: float, cost_s: float) -> None:
        """One has ended now, and took so long."""
        self._since_s, self._cost_s = now_s, cost_s
