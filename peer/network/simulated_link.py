"""One direction between two simulated peers: when a segment leaves and arrives.

The rules stand in simulated.py.
"""

import random
from dataclasses import dataclass
from typing import Final, Protocol

import trio

RETRANSMIT_MIN_S: Final = 0.2
"""A lost segment costs this much, or a round trip if that is more."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """One direction between two peers.

    Attributes:
        latency_s: one way.
        jitter_s: up to so much more, evenly spread.
        bandwidth_bytes_per_s: shared by all streams of the link.
        loss: probability that a segment must be sent again.
    """

    latency_s: float = 0.02
    jitter_s: float = 0.0
    bandwidth_bytes_per_s: float = 12.5e6
    loss: float = 0.0

    def __post_init__(self) -> None:
        if min(self.latency_s, self.jitter_s) < 0 or self.bandwidth_bytes_per_s <= 0:
            raise ValueError(f"not a link: {self}")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss must be in [0, 1): {self}")


class LinkWatcher(Protocol):
    """A watcher that hears when a link is cut or carries again."""

    def link_cut(self) -> None: ...
    def link_mended(self, cut_since_s: float) -> None: ...


class SimulatedLink:
    """The state of one direction between two peers."""

    def __init__(self, model: LinkModel, seed: bytes) -> None:
        self.model = model
        self.watchers: dict[LinkWatcher, None] = {}
        self.cut_since_s: float | None = None
        """When the link was cut; None while it carries."""
        self._random = random.Random(seed)
        self._busy_until_s = 0.0

    def schedule(self, num_bytes: int) -> tuple[float, float]:
        """Take the link for a segment: when it has left, and when it arrives."""
        model = self.model
        start_s = max(trio.current_time(), self._busy_until_s)
        self._busy_until_s = start_s + num_bytes / model.bandwidth_bytes_per_s
        delay_s = model.latency_s + model.jitter_s * self._random.random()
        while model.loss and self._random.random() < model.loss:
            delay_s += max(RETRANSMIT_MIN_S, 2 * model.latency_s)
        return self._busy_until_s, self._busy_until_s + delay_s

    def cut(self) -> None:
        """Let nothing pass."""
        if self.cut_since_s is None:
            self.cut_since_s = trio.current_time()
            for watcher in list(self.watchers):
                watcher.link_cut()

    def mend(self) -> None:
        """Let everything pass again."""
        cut_since_s, self.cut_since_s = self.cut_since_s, None
        if cut_since_s is not None:
            for watcher in list(self.watchers):
                watcher.link_mended(cut_since_s)
