"""What happens to whom, drawn from a seed before anything runs.

The plan knows which homes should be up, and nothing of what came of it: so the same seed is the
same storm for every version of the code.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """What can happen."""

    KILL = "kill -9"
    HANG_UP = "SIGHUP"
    TERM = "SIGTERM"
    POWER = "power loss"
    """kill -9 of every process of every home, at once."""
    FULL = "full disk"
    """No byte is left; after a while there is room again."""
    FULL_RESTART = "full disk, kill -9, start"
    """Killed and started again on a full disk; then there is room, and it is started once more."""
    START = "start"


WEIGHTS: Final = {
    Kind.KILL: 4.0,
    Kind.HANG_UP: 4.0,
    Kind.TERM: 4.0,
    Kind.POWER: 3.0,
    Kind.FULL: 2.0,
    Kind.FULL_RESTART: 2.0,
}
START_WEIGHT: Final = 12.0
"""For each home that is down."""
ENDS: Final = frozenset({Kind.KILL, Kind.TERM})


@dataclass(frozen=True, slots=True)
class Happening:
    """One event of a storm.

    Attributes:
        home: whom it happens to; None is everybody.
        up: the homes that should be running when it is over.
    """

    kind: Kind
    home: int | None
    up: frozenset[int]


def draw(seed: int, num_homes: int, num_events: int) -> Iterator[Happening]:
    """A storm over homes that are all up at first."""
    dice, everybody = random.Random(seed), frozenset(range(num_homes))
    up = everybody
    for _ in range(num_events):
        kind = _kind(dice, len(up), num_homes)
        if kind is Kind.POWER:
            home, up = None, frozenset[int]()
        else:
            home = dice.choice(sorted(everybody - up if kind is Kind.START else up))
            up = up - {home} if kind in ENDS else up | {home}
        yield Happening(kind, home, up)


def _kind(dice: random.Random, num_up: int, num_homes: int) -> Kind:
    if not num_up:
        return Kind.START
    weights = WEIGHTS | {Kind.START: START_WEIGHT * (num_homes - num_up)}
    (kind,) = dice.choices(list(weights), list(weights.values()))
    return kind
