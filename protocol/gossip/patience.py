"""How long a free peer waits for a partner that it has not met of late.

The idea. Averages spread only when partners change; but on thin lines two peers end their exchange
at the same moment, are both free, and nobody else is. Waiting for others costs time on the line,
averaging with the same peer again costs mixing. So a peer waits as long as waiting costs nothing,
and saves up a small share of its time for longer waits.

The rules
  1. Slack: where an exchange is shorter than a round, half of the difference may be waited. The
     line would be idle in any case.
  2. Savings: each exchange adds SAVED_SHARE of its length, and a wait beyond the slack takes off
     what it lasted. They are spent once they come to LUMP_SHARE of an exchange, not before: many
     waits that are all too short for another pair to come would bring nobody new, and two peers
     would meet for ever. They are never longer than an exchange.
  3. So at most SAVED_SHARE of the time is lost to waiting where lines are always busy.

Source: docs/decisions/0016-gossip-without-a-clock.md (simulated: without savings 99% of the
exchanges are repeats where an exchange outlasts a round; with them a fifth or less).
"""

from typing import Final

SLACK_SHARE: Final = 0.5
SAVED_SHARE: Final = 0.08
LUMP_SHARE: Final = 0.2
SMOOTHING: Final = 0.3
"""Weight of the newest exchange in the estimate of the next one's length."""


class Patience:
    """What one peer has saved. Seconds."""

    def __init__(self) -> None:
        self._exchange_s: float | None = None
        self._saved_s = 0.0

    def for_fresh_s(self, round_s: float) -> float:
        """How long to wait for a partner that was not met of late, in a round of this length."""
        exchange_s = self._exchange_s
        if exchange_s is None:
            return self._slack_s(round_s)
        lump_s = self._saved_s if self._saved_s >= LUMP_SHARE * exchange_s else 0.0
        return max(self._slack_s(round_s), lump_s)

    def exchanged(self, waited_s: float, exchange_s: float, round_s: float) -> None:
        """An exchange of this length has ended; before it this was waited for a partner."""
        spent_s = max(0.0, waited_s - self._slack_s(round_s))
        before_s = exchange_s if self._exchange_s is None else self._exchange_s
        self._exchange_s = before_s + SMOOTHING * (exchange_s - before_s)
        saved_s = max(0.0, self._saved_s - spent_s) + SAVED_SHARE * exchange_s
        self._saved_s = min(exchange_s, saved_s)

    def _slack_s(self, round_s: float) -> float:
        return SLACK_SHARE * max(0.0, round_s - (self._exchange_s or 0.0))
