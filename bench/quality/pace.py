"""Peers of unequal speed in one loop: who begins a step when, and who counts for how many.

A replica with quota q does q steps in a round of H, H / q apart: its step j begins with the first
place k of the round for which k q >= j H. The first begins with the round, the last is done when
the round is.

A weighted mean needs no outer step of its own: a group may name a member more than once, and its
mean is then weighted by how often each is named. Two peers of 8 and 2 steps are a group of 4 + 1.
"""

import math
from collections.abc import Sequence


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
