"""How a microbatch is named, and where it is on its way.

A microbatch starts at its data peer, which holds stage 0, visits relays, comes back for the loss,
and its gradient walks the same way back:

    place      0            1 .. n         n + 1
    peer       data peer    relays         the same data peer, for head and loss
    forward    -------------------------->
    backward   <--------------------------

A *trip* is a microbatch's move to a place: with each, its activations (or their gradient) go from
one peer to the next. A `score` is a forward that no gradient follows.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from .paths import Path, descents


class Leg(StrEnum):
    """Which way, and what for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SCORE = "score"


@dataclass(frozen=True, slots=True, order=True)
class Microbatch:
    """The name of one microbatch, in its run.

    Attributes:
        origin: its data peer.
        iteration: of the swarm, in which its gradient counts (relay.py).
        index: its number among those of its data peer, which never repeats.
    """

    origin: str
    iteration: int
    index: int


@dataclass(frozen=True, slots=True)
class Trip:
    """A move of a microbatch.

    Attributes:
        path: the relays, in the order of the forward.
        place: where it goes to; see the top of the file.
        stages: of the relays.
        plan: digest of the plan that the path was taken from; None where there was none.
    """

    microbatch: Microbatch
    leg: Leg
    path: tuple[str, ...]
    place: int
    stages: tuple[int, ...]
    plan: str | None = None

    @classmethod
    def begin(cls, microbatch: Microbatch, leg: Leg, path: Path, place: int) -> Self:
        """The first move of a leg."""
        return cls(microbatch, leg, path.relays, place, path.stages, path.plan)

    @property
    def receiver(self) -> str:
        """The peer at that place."""
        if 1 <= self.place <= len(self.path):
            return self.path[self.place - 1]
        return self.microbatch.origin

    @property
    def sender(self) -> str:
        """The peer that it comes from."""
        before = self.place + (1 if self.leg is Leg.BACKWARD else -1)
        return replace(self, place=before).receiver

    @property
    def descents_ahead(self) -> int:
        """Hops to a lower stage that follow on the way forward, once it is at that place."""
        return descents(self.stages[max(0, self.place - 1) :])

    def next_move(self) -> "Trip | None":
        """The move that follows once this one has been worked on; None at the end of the path."""
        if self.receiver != self.microbatch.origin:
            return self.onward()
        if self.leg is Leg.FORWARD:
            return replace(self, leg=Leg.BACKWARD, place=len(self.path))
        return None

    def onward(self) -> "Trip":
        """The next move of the same leg."""
        step = -1 if self.leg is Leg.BACKWARD else 1
        return replace(self, place=self.place + step)
