"""How a microbatch is named, and where it is on its way.

A microbatch starts at its data peer, which holds stage 0, visits relays, comes back for the loss,
and its gradient walks the same way back:

    place      0            1 .. n         n + 1
    peer       data peer    relays         the same data peer, for head and loss
    forward    -------------------------->
    backward   <--------------------------

A *trip* is a microbatch's move to a place: with each, its activations (or their gradient) go from
one peer to the next. A `score` is a forward that no gradient follows.

A microbatch that has lost a relay on its way back goes on under its name, with a higher *attempt*
(mending.py). Its forward is then done again only for the places that need it, up to `until`.
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
        attempt: how often the microbatch has been mended.
        until: the last place of this forward; 0 is place n + 1.
    """

    microbatch: Microbatch
    leg: Leg
    path: tuple[str, ...]
    place: int
    stages: tuple[int, ...]
    plan: str | None = None
    attempt: int = 0
    until: int = 0

    @classmethod
    def begin(
        cls, microbatch: Microbatch, leg: Leg, path: Path, place: int, attempt: int = 0
    ) -> Self:
        """The first move of a leg."""
        return cls(microbatch, leg, path.relays, place, path.stages, path.plan, attempt)

    @property
    def goes_on(self) -> bool:
        """Whether the receiver sends on what it makes of it."""
        return self.place != self.until

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
        """The move that follows once this one has been worked on; None at the end of the path.

        None also where the microbatch has been mended: what follows is said to each peer then.
        """
        if self.attempt:
            return None
        if self.receiver != self.microbatch.origin:
            return self.onward()
        if self.leg is Leg.FORWARD:
            return replace(self, leg=Leg.BACKWARD, place=len(self.path))
        return None

    def onward(self) -> "Trip":
        """The next move of the same leg."""
        return replace(self, place=self.place + (-1 if self.leg is Leg.BACKWARD else 1))

    def back(self) -> "Trip":
        """The gradient's move from the receiver of this forward to the place before."""
        return replace(self, leg=Leg.BACKWARD, place=self.place - 1, until=0)
