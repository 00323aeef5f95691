"""Links between every two hosts, each with a delay and a rate of its own: a table, drawn by a seed.

A link is one way; the two ways between two hosts share their delay, as distance has no direction,
and differ in rate. What leaves a host goes first through its uplink, which all links share.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

DELAYS_S: Final = (0.004, 0.140)
RATES_BITS_PER_S: Final = (20e6, 300e6)


@dataclass(frozen=True, slots=True)
class Link:
    """From one host to another.

    Attributes:
        delay_s: one way, of an empty link, beside the time that sending takes.
        bits_per_s: of this link alone.
    """

    delay_s: float
    bits_per_s: float


@dataclass(frozen=True, slots=True)
class LinkTable:
    """All links among some hosts.

    Attributes:
        links: by source and destination.
        uplinks_bits_per_s: by host; what a host sends to all others together. None is no limit.
    """

    links: Mapping[tuple[int, int], Link]
    uplinks_bits_per_s: Sequence[float | None]

    def __post_init__(self) -> None:
        hosts = range(self.num_hosts)
        wanted = {(a, b) for a in hosts for b in hosts if a != b}
        if set(self.links) != wanted:
            raise ValueError(f"links of {sorted(self.links)}, wanted {sorted(wanted)}")

    @property
    def num_hosts(self) -> int:
        return len(self.uplinks_bits_per_s)

    def round_trip_s(self, a: int, b: int) -> float:
        """Round trip of an empty link."""
        return self.links[a, b].delay_s + self.links[b, a].delay_s

    def rate(self, source: int, destination: int) -> float:
        """Bits per second that one transfer alone gets."""
        uplink = self.uplinks_bits_per_s[source]
        return min(self.links[source, destination].bits_per_s, uplink or math.inf)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        links = [
            {"source": source, "destination": destination, **asdict(link)}
            for (source, destination), link in self.links.items()
        ]
        return {"links": links, "uplinks_bits_per_s": list(self.uplinks_bits_per_s)}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        links = {
            (each["source"], each["destination"]): Link(each["delay_s"], each["bits_per_s"])
            for each in tree["links"]
        }
        return cls(links, tree["uplinks_bits_per_s"])


def draw_table(
    num_hosts: int,
    seed: int,
    *,
    uplinks_bits_per_s: Mapping[int, float] | None = None,
    delays_s: tuple[float, float] = DELAYS_S,
    rates_bits_per_s: tuple[float, float] = RATES_BITS_PER_S,
) -> LinkTable:
    """Delays and rates between these bounds, each tenfold as likely as the next tenfold.

    Args:
        uplinks_bits_per_s: by host; the others have no limit of their own.
    """
    draws, links = random.Random(seed), {}
    for a in range(num_hosts):
        for b in range(a + 1, num_hosts):
            delay_s = _between(draws, delays_s)
            for way in ((a, b), (b, a)):
                links[way] = Link(delay_s, _between(draws, rates_bits_per_s))
    given = uplinks_bits_per_s or {}
    return LinkTable(links, [given.get(host) for host in range(num_hosts)])


def _between(draws: random.Random, bounds: tuple[float, float]) -> float:
    low, high = map(math.log, bounds)
    return math.exp(draws.uniform(low, high))
