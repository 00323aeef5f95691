"""Peers of unequal speed in one loop: which begin a step when, and which count for how many.

A replica with quota q does q steps in a round of H, H / q apart: its step j begins with the first
place k of the round for which k q >= j H. The first begins with the round, the last is done when
the round is.

A weighted mean needs no outer step of its own: a group may name a member more than once, and its
mean is then weighted by how often each is named. Two peers of 8 and 2 steps are a group of 4 + 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from protocol.schedule.rounds import whole_steps

Pooling = Literal["equal", "tokens", "normalised"]


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast replicas are, and what is made of it; all alike, unless it is said.

    Attributes:
        pooling: what of a peer's weights goes into the mean of a pair (unequal.py).
        slow: speeds of the last replicas; the others have 1.
        waits: all replicas train at the pace of the slowest.
        leaves_out: replicas that do not take part: so many of the last.
    """

    pooling: Pooling = "equal"
    slow: tuple[float, ...] = ()
    waits: bool = False
    leaves_out: int = 0

    @property
    def step_time(self) -> int:
        """Length of an inner step, in the setting's steps."""
        return round(1 / min(self.slow)) if self.waits else 1

    def nodes(self, replicas: int) -> int:
        """Number of the setting's replicas that take part."""
        return replicas - self.leaves_out

    def of(self, replicas: int) -> list[float]:
        """Speeds of all replicas that take part, in steps per step of the median."""
        return [*[1.0] * (self.nodes(replicas) - len(self.slow)), *self.slow]

    def quotas(self, inner_steps: int, replicas: int) -> list[int]:
        """Inner steps of each replica in a round of `inner_steps`."""
        speeds = self.of(replicas)
        if self.waits:
            return [inner_steps] * len(speeds)
        return [whole_steps(inner_steps, speed, speeds) for speed in speeds]

    def votes(self, steps: Sequence[int]) -> list[int]:
        """Votes of each member of a group, by the steps of all in this round."""
        return in_lowest_terms(steps) if self.pooling == "tokens" else [1] * len(steps)

    def stretch(self, steps: int, inner_steps: int) -> float:
        """Factor of the move of a replica since its phi, before it is sent."""
        return inner_steps / steps if self.pooling == "normalised" else 1.0


ALL_ALIKE: Final = Speeds()


def active_at(place: int, quotas: Sequence[int], inner_steps: int) -> list[int] | None:
    """Which replicas begin a step at this place of a round (0 .. H - 1); None for all of them.

    With no quota of H there are places at which nobody does.

    Raises:
        ValueError: a quota is above H; replicas are not faster than the median here.
    """
    if not all(1 <= quota <= inner_steps for quota in quotas):
        raise ValueError(f"quotas {list(quotas)} are not all in 1 .. {inner_steps}")
    found = [i for i, quota in enumerate(quotas) if place * quota % inner_steps < quota]
    return None if len(found) == len(quotas) else found


def in_lowest_terms(steps: Sequence[int]) -> list[int]:
    """The smallest whole numbers in the same proportion."""
    divisor = math.gcd(*steps)
    return [count // divisor for count in steps]


def as_often_as_voted(own: int, group: Sequence[int], votes: Sequence[int]) -> list[int]:
    """The members of a group, `own` first, each as often as it counts."""
    others = [
        member
        for member, count in zip(group, votes, strict=True)
        for _ in range(count - (member == own))
    ]
    return [own, *others]
