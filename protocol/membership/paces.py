"""At which pace one peer, and all of one network, may begin something.

Idea. Each of them has an allowance: so many a second, and a burst of them. What goes beyond that
waits until its turn has come; nobody is refused for it. Where a peer's messages are read at such a
pace, its flood piles up on its own line.

Invariant: what is kept grows with those that have begun something in the last seconds, never with
all that were seen: an allowance that has filled up again is as good as a new one.
"""

from collections.abc import Hashable
from typing import Final

from protocol.address.prefix import prefix_of


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


SWEPT_EVERY_S: Final = 10.0


class Paces:
    """See the top of the file.

    Args:
        per_peer, per_prefix: of each so many a second.
        burst_s: seconds' worth of them may come at once.
    """

    def __init__(self, per_peer: float, per_prefix: float, burst_s: float) -> None:
        self._per_s = {"peer": per_peer, "prefix": per_prefix}
        self._burst_s = burst_s
        self._kept: dict[tuple[str, Hashable], tuple[Allowance, float]] = {}
        self._swept_s = 0.0

    def begin(self, now_s: float, peer_id: str, address: str) -> float:
        """A peer, which comes from this address, begins one more; how long it should wait."""
        self._sweep(now_s)
        wait_s = self._spend(now_s, "peer", peer_id)
        prefix = prefix_of(address)
        return wait_s if prefix is None else max(wait_s, self._spend(now_s, "prefix", prefix))

    def _spend(self, now_s: float, kind: str, name: Hashable) -> float:
        per_s = self._per_s[kind]
        allowance, _ = self._kept.get((kind, name), (Allowance(per_s, per_s * self._burst_s), 0.0))
        wait_s = allowance.spend(now_s, 1.0)
        self._kept[kind, name] = allowance, now_s + wait_s + self._burst_s
        return wait_s

    def _sweep(self, now_s: float) -> None:
        """Forget allowances that are full again."""
        if now_s >= self._swept_s + SWEPT_EVERY_S:
            self._swept_s = now_s
            self._kept = {key: kept for key, kept in self._kept.items() if kept[1] > now_s}
