"""What simulated peers live in: lines with delays and rates, uplinks that some share, speeds."""

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from protocol.schedule.rounds import owed_steps

INNER_STEPS: Final = 60
ROUND_S: Final = 60.0
"""A round of the middle peer."""
SPREAD: Final = 1.5
UPLINK: Final = (0, 1)
"""Peers behind one uplink."""


@dataclass(frozen=True, slots=True)
class Line:
    """The line between two peers, one way: latency, and how long a whole vector takes alone."""

    latency_s: float
    vector_s: float


@dataclass(frozen=True, slots=True)
class World:
    """What peers live in.

    Attributes:
        lines: by pair of places, lower first.
        uplinks: place to (name of a shared uplink, how long a vector takes on it alone).
        step_s: by place: mean seconds of an own step.
        scatter: standard deviation of a round's seconds, as a share.
        inner_steps: H.
    """

    lines: Mapping[tuple[int, int], Line]
    uplinks: Mapping[int, tuple[str, float]]
    step_s: tuple[float, ...]
    scatter: float
    inner_steps: int = INNER_STEPS

    @property
    def num_peers(self) -> int:
        """How many live in it."""
        return len(self.step_s)

    def line(self, one: int, other: int) -> Line:
        """The line between two places."""
        return self.lines[min(one, other), max(one, other)]

    def owed(self, place: int) -> float:
        """Own steps that a peer owes to a round."""
        speeds = [1 / step_s for step_s in self.step_s]
        return owed_steps(self.inner_steps, speeds[place], speeds)

    def alone_s(self, one: int, other: int) -> dict[str, float]:
        """The length of an exchange of these two on each line, if nothing else uses it."""
        uplinks = dict(self.uplinks[each] for each in (one, other) if each in self.uplinks)
        return uplinks | {f"{one}-{other}": self.line(one, other).vector_s}


def world_of(
    num_peers: int, ratio: float, seed: int, *, scatter: float = 0.25, equal: bool = False
) -> World:
    """A seeded world of unequal peers, or of equal ones on equal lines.

    Args:
        ratio: exchange over round, of the middle pair.
        scatter: standard deviation of a round's seconds, as a share.

    Unequal lines have 4 to 140 ms, and rates within a factor of 1.5 of the middle; speeds are from
    half to twice the middle; peers 0 and 1 are behind one uplink, which carries one exchange at the
    middle rate.
    """
    rng = random.Random(f"{num_peers}/{seed}")
    vector_s, spread = ratio * ROUND_S, 0.0 if equal else math.log(SPREAD)
    lines = {
        pair: Line(rng.uniform(0.004, 0.140), vector_s * math.exp(rng.uniform(-spread, spread)))
        for pair in itertools.combinations(range(num_peers), 2)
    }
    speeds = [1.0 if equal else 2 ** rng.uniform(-1, 1) for _ in range(num_peers)]
    middle = median(speeds)
    step_s = tuple(ROUND_S / INNER_STEPS * middle / speed for speed in speeds)
    uplinks = {} if equal else dict.fromkeys(UPLINK, ("home", vector_s))
    return World(lines, uplinks, step_s, scatter)
