"""What a data peer knows of its microbatches: of each that is on its way, and of the iteration.

Also the relays that it can send them to; and the gradients that relays have added, and may not have
stepped with, which are gone if such a relay dies. A relay steps with an iteration's gradients
before it takes a microbatch of the next; so what has come through it in a later iteration says that
it has stepped with those before.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from protocol.outcomes import RefusalReason

from .mending import Mending
from .paths import Path, Relays
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
class OwnIteration:
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


# --- relays that are there ------------------------------------------------------------------------
STAND_IN_S: Final = 120.0
"""How long somebody may take to come to a stage that nobody holds. A peer of another stage goes
over after half a minute (protocol/run/assignment.py), and fetches its new stage then."""


class RelaysThere:
    """See the top of the file.

    Attributes:
        stages: the peers of each stage from the second on that train, sorted.
        all: all of them.
        failed: those that have lost a microbatch in this iteration; others are preferred.
        trained: whether the run has been: before that a stage has not come yet, rather than gone.
    """

    def __init__(self) -> None:
        self.stages: Relays = ()
        self.all: frozenset[str] = frozenset()
        self.failed: set[str] = set()
        self.trained = False
        self._empty_since_s: dict[int, float] = {}

    def update(self, stages: Relays, now_s: float) -> tuple[frozenset[str], frozenset[str]]:
        """Take over who is there now. Returns those that have come, and those that have gone."""
        before, self.stages = self.all, stages
        self.all = frozenset(relay for stage in stages for relay in stage)
        come, gone = self.all - before, before - self.all
        self.failed.difference_update(come)
        self.failed.update(gone)
        self._empty_since_s = {s: self._empty_since_s.get(s, now_s) for s in self.missing}
        return come, gone

    @property
    def missing(self) -> tuple[int, ...]:
        """The stages that nobody holds; counted from 1, for the data peers hold stage 0."""
        return tuple(stage for stage, peers in enumerate(self.stages, 1) if not peers)

    def are_long_gone(self, stages: Collection[int], now_s: float) -> bool:
        """Whether one of these stages has had nobody for longer than a stand-in may take."""
        return any(
            stage in stages and now_s - since_s >= STAND_IN_S
            for stage, since_s in self._empty_since_s.items()
        )

    @property
    def sound(self) -> Relays:
        """Those that have not failed; a stage where all have failed is as it is."""
        return tuple(
            tuple(relay for relay in stage if relay not in self.failed) or stage
            for stage in self.stages
        )

    def stand_in(self, stage: int, path: Collection[str], turn: int) -> str | None:
        """Another peer of a stage, that is not on this path; None where there is none."""
        if not 0 < stage <= len(self.stages):
            return None
        others = [relay for relay in self.sound[stage - 1] if relay not in path]
        return others[turn % len(others)] if others else None


# --- gradients that may go with a relay -----------------------------------------------------------
class Unstepped:
    """See the top of the file."""

    def __init__(self) -> None:
        self._added: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def add(self, path: Iterable[str], iteration: int) -> None:
        """These relays have added a microbatch of that iteration."""
        for relay in path:
            added = self._added[relay]
            added[iteration] += 1
            for before in [each for each in added if each < iteration]:
                del added[before]

    def pop(self, relay: str) -> int:
        """A relay is gone: how many gradients have gone with it."""
        return sum(self._added.pop(relay, Counter()).values())

    def forget_before(self, iteration: int) -> None:
        """Nothing of earlier iterations can be gone."""
        for relay in list(self._added):
            added = self._added[relay]
            for before in [each for each in added if each < iteration]:
                del added[before]
            if not added:
                del self._added[relay]
