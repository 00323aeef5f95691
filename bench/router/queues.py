"""When a packet arrives: uplink, then link, each a line that sends one bit after the other.

A line is described by one number, the time at which it is free. A packet that comes at `t` begins
at max(t, free) and ends bits / rate later; then the line is free again. Two lines in a row are one
pipe: the second sends the first bits while the first still sends the last ones, but ends no sooner
than the first. So a transfer alone takes the slower line's time, and not the sum of both.

Rules:
- First come, first served, per line. So packets of one link arrive in the order they came in.
- What would wait longer than the queue's seconds is dropped. A packet dropped at the link has
  passed the uplink, and has cost its time there.
"""

from dataclasses import dataclass
from typing import Final

from bench.link_table import LinkTable

QUEUE_S: Final = 0.25
"""Longest wait for a line, in seconds of its rate."""


@dataclass(slots=True)
class _Line:
    """What sends one bit after the other."""

    bits_per_s: float
    free_s: float = 0.0

    def begins_s(self, now_s: float, queue_s: float) -> float | None:
        """When a packet's first bit leaves; None: the queue is full."""
        begins_s = max(now_s, self.free_s)
        return None if begins_s - now_s > queue_s else begins_s


class Queues:
    """All lines of a table.

    Attributes:
        dropped: packets that found a queue full.
    """

    def __init__(self, table: LinkTable, queue_s: float = QUEUE_S) -> None:
        self._queue_s = queue_s
        self._uplinks = [_Line(rate or float("inf")) for rate in table.uplinks_bits_per_s]
        self._links = {
            way: (_Line(link.bits_per_s), link.delay_s) for way, link in table.links.items()
        }
        self.dropped = 0

    def arrival_s(
        self, now_s: float, source: int, destination: int, num_bytes: int
    ) -> float | None:
        """When a packet that leaves the source now arrives; None: it is dropped.

        Raises:
            KeyError: there is no such link.
        """
        bits = 8 * num_bytes
        uplink, (link, delay_s) = self._uplinks[source], self._links[source, destination]
        begins_s = uplink.begins_s(now_s, self._queue_s)
        if begins_s is None:
            self.dropped += 1
            return None
        uplink.free_s = up_s = begins_s + bits / uplink.bits_per_s
        begins_s = link.begins_s(begins_s, self._queue_s)
        if begins_s is None:
            self.dropped += 1
            return None
        link.free_s = max(begins_s + bits / link.bits_per_s, up_s)
        return link.free_s + delay_s
