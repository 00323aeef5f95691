"""What a data peer knows of its microbatches: of each that is on its way, and of the iteration."""

from collections import deque
from dataclasses import dataclass, field

from protocol.outcomes import RefusalReason

from .mending import Mending
from .paths import Path
from .trip import Leg, Microbatch, Trip


@dataclass(slots=True)
class Away:
    """A microbatch on its way.

    Attributes:
        way: its path, with stages.
        since_s: when it set out first.
        without: whether a stage had nobody when it set out.
        setouts: how often it has set out, each time under a new name.
        nearly_home: whether its gradient has come as far as its last hop.
        turned: whether it has come to the loss: stages may have added its gradient.
        finishing: whether the trainer is at the loss.
        home: whether its gradient is here.
        attempt: how often it has been mended.
        mending: the answers of its relays, while it is halted.
        gone: relays of its path that are gone, and of which nothing is needed.
        until: the last place to which our activations go once more; 0 where they do not.
        returns: whether the gradient of the loss is to be sent.
        distrusted: relays whose gradient was refused: what they keep is not asked for.
        accusers: relays that have refused one.
    """

    number: int
    microbatch: Microbatch
    way: Path
    since_s: float
    leg: Leg
    without: bool = False
    setouts: int = 1
    nearly_home: bool = False
    turned: bool = False
    finishing: bool = False
    home: bool = False
    attempt: int = 0
    mending: Mending | None = None
    gone: frozenset[str] = frozenset()
    until: int = 0
    returns: bool = True
    distrusted: set[str] = field(default_factory=set)
    accusers: set[str] = field(default_factory=set)

    @property
    def path(self) -> tuple[str, ...]:
        """The relays that it visits."""
        return self.way.relays

    def is_due(self, trip: Trip) -> bool:
        """Whether a trip is of the present attempt, and not of one that is halted."""
        is_for_this = (trip.leg is Leg.SCORE) == (self.leg is Leg.SCORE)
        is_present = trip.attempt == self.attempt and self.mending is None
        return is_for_this and is_present and not self.home

    @property
    def can_be_mended(self) -> bool:
        """Whether stages may have added its gradient, and its end is still open."""
        return self.turned and not self.home


@dataclass(slots=True)
class Iteration:
    """What the trainer has begun.

    Attributes:
        left: microbatches that have not come to an end.
        paths: of those that have no name yet; None until there are relays.
        named: those that have one, and have not set out (rule 7 of data_peer.py).
        ready: (number, slot) of those that could set out, and wait for a path.
        again: those that set out again as soon as the trainer has produced them once more.
        stuck: those that it has produced once more, and their slots, which wait for a tick.
        welcomed: the moves to us that were let come: (microbatch, leg, attempt).
    """

    left: int = 0
    paths: deque[Path] | None = None
    named: deque[tuple[Microbatch, Path]] = field(default_factory=deque)
    ready: list[tuple[int, int]] = field(default_factory=list)
    again: dict[int, Away] = field(default_factory=dict)
    stuck: list[tuple[Away, int]] = field(default_factory=list)
    welcomed: set[tuple[Microbatch, Leg, int]] = field(default_factory=set)

    def welcome(self, trip: Trip) -> RefusalReason | None:
        """Let a move come, unless it was let already (rule 8 of data_peer.py)."""
        move = trip.microbatch, trip.leg, trip.attempt
        if move in self.welcomed:
            return RefusalReason.TWICE
        self.welcomed.add(move)
        return None

    def unwelcome(self, trip: Trip) -> None:
        """A move that was let come has broken off."""
        self.welcomed.discard((trip.microbatch, trip.leg, trip.attempt))

    def path_of(self, microbatch: Microbatch) -> tuple[str, ...] | None:
        """The relays of one that has a name, and has not set out."""
        found = (path.relays for name, path in self.named if name == microbatch)
        return next(found, None)

    def rename(self, microbatch: Microbatch, name: Microbatch) -> None:
        """One that has a name, and has not set out, gets another."""
        at = [named for named, _ in self.named].index(microbatch)
        self.named[at] = name, self.named[at][1]
