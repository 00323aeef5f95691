"""Which relays a microbatch visits: the one question that a data peer's core asks a router.

A *path* is the relays in the order of the forward, with the stage of each. Stages may be left out,
and visited in another order than they are numbered in, within the limits of the run spec (CC3,
protocol/pipeline/problem.py). Routers stand in protocol/routing.

A hop to a lower stage is a *descent*. Slots along a path are taken one after another, and held; the
number of descents ahead of a microbatch says which of them it may take (relay.py, rule 6).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

Relays = tuple[tuple[str, ...], ...]
"""The peers of each stage from the second on, sorted."""


@dataclass(frozen=True, slots=True)
class Path:
    """See the top of the file.

    Attributes:
        relays: peer ids.
        stages: of each of them.
        plan: digest of the plan that it was taken from; None where there was none.
    """

    relays: tuple[str, ...]
    stages: tuple[int, ...]
    plan: str | None = None


class Router(Protocol):
    """Chooses paths for the microbatches of one data peer. A path has no relay twice."""

    def paths(self, iteration: int, microbatches: int, relays: Relays) -> Sequence[Path]:
        """One for each microbatch of an iteration; none where a path finds no relay.

        Args:
            relays: those that are there; a stage may be empty, and is left out then.
        """

    def another(self, before: Path, turn: int, relays: Relays) -> Path | None:
        """A path for a microbatch that sets out again.

        Args:
            turn: a number that differs from time to time.
            relays: those that have not failed; a stage may be empty.
        """

    def whole(self, turn: int, relays: Relays) -> Path | None:
        """A path through all stages in order, for validation."""


def descents(stages: Sequence[int]) -> int:
    """How often the next stage is lower than the one before."""
    return sum(after < before for before, after in pairwise(stages))
