"""How a microbatch goes on that has lost a relay on its way back: who does what once more.

Theory. A relay that waits for a microbatch's gradient still holds its forward, so it can send its
activations again; one that has sent a gradient keeps it until the receiver's own has been taken by
the next. So what a dead relay had in hand is nearly always still there on both sides of it: a
*stand-in*, another replica of its stage, gets the activations from one side, computes the forward
again, gets the gradient from the other side, adds, and goes on. The data peer knows the path, so it
decides:

  1. It *halts* the microbatch: every relay of the path that lives drops what belongs to earlier
     attempts, sends and takes nothing of the microbatch any more, and says where it *stands*.
  2. When all have answered it finds the place nearest to home whose gradient is *kept*; that place
     sends it again. All places before it which do not *wait* need the forward (again): a stand-in,
     or a relay that has added and whose kept gradient is gone. Where no gradient is kept anywhere,
     as when two neighbours died, that leads once more through the head.
     If a stage has nobody left, the microbatch stays halted until somebody comes, or until its
     data peer gives it up (data_peer.py, rule 5).
  3. Its relays *resume* with the new path. Activations go from the last place that waits through
     those that need them, and no further.

Only a relay that is gone, or one that says that it has not added and cannot be reached by its
neighbours, is replaced. Every other keeps its place in the path, and adds a microbatch once: what
comes again is computed without being added. So a stage counts a gradient twice only if its relay is
gone for the data peer, and lives on for its stage.

Source: SWARM (Ryabinin et al., 2023) does this from the trainer, which holds all activations; here
they stay where they were made. Gradients that have been sent stay in their outbound slots until
they are passed on.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from protocol.wire.stage_messages import (
    Halt,
    Leg,
    Lost,
    Microbatch,
    Path,
    Resume,
    Standing,
    Trip,
)

from .core import Command, Counted, SendBoundary, Tell
from .relays import RelaysThere
from .trainer_messages import Freed, Resend

# --- gradients that are kept ----------------------------------------------------------------------
KEPT_PER_SLOT: Final = 2
"""Gradients kept for each microbatch that a machine has room for."""
KEPT: Final = 8
"""Gradients kept at once, where nobody says otherwise."""


class KeptGradients:
    """Gradients that have been sent, and stay in their slots; of these microbatches.

    Args:
        limit: kept at once; the oldest makes room.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sent: dict[Microbatch, SendBoundary] = {}

    def __iter__(self) -> Iterator[Microbatch]:
        return iter(self._sent)

    def __contains__(self, microbatch: Microbatch) -> bool:
        return microbatch in self._sent

    def attempt_of(self, microbatch: Microbatch) -> int:
        """The attempt in which it was sent; 0 where it is not kept."""
        return self._sent[microbatch].trip.attempt if microbatch in self._sent else 0

    def keep(self, sent: SendBoundary) -> list[Command]:
        """Keep a gradient, which is sent like this, now or later."""
        commands = self.drop(sent.trip.microbatch)
        if len(self._sent) >= self._limit:
            commands += self.drop(next(iter(self._sent)))
        self._sent[sent.trip.microbatch] = sent
        return commands

    def send(self, trip: Trip) -> list[Command]:
        """Send a gradient, if it is kept."""
        sent = self._sent.get(trip.microbatch)
        if sent is None:
            return []
        self._sent[trip.microbatch] = send = SendBoundary(trip, sent.slot, sent.loss, keeps=True)
        return [send]

    def passed(self, microbatch: Microbatch, taker: str) -> list[Command]:
        """The one that took it says that its own has been taken."""
        sent = self._sent.get(microbatch)
        return self.drop(microbatch) if sent is not None and sent.trip.receiver == taker else []

    def drop(self, microbatch: Microbatch) -> list[Command]:
        """Keep it no longer; nothing happens where it is not kept."""
        sent = self._sent.pop(microbatch, None)
        return [] if sent is None else [Freed(sent.slot)]

    def drop_all(self) -> list[Command]:
        """Keep nothing."""
        return [command for microbatch in list(self._sent) for command in self.drop(microbatch)]

    def clear(self, limit: int) -> None:
        """The memory is gone, and all that lay in it; there is new one for so many."""
        self._sent.clear()
        self._limit = limit


# --- who does what once more ----------------------------------------------------------------------
REPLACEABLE: Final = (Standing.WAITS, Standing.NOTHING)
"""A relay that lives and stands so may be replaced: it has not added."""


@dataclass(frozen=True, slots=True)
class ResumeOrder:
    """What the peer at a place does.

    Attributes:
        until: the last place to which its activations go once more; 0 where they do not.
        returns: whether it sends the gradient that it keeps.
    """

    place: int
    until: int
    returns: bool


def first_kept(path: tuple[str, ...], standings: Mapping[str, Standing]) -> int:
    """The place nearest to home whose gradient is kept; n + 1 where no relay has it."""
    for place, relay in enumerate(path, 1):
        if standings.get(relay) is Standing.KEEPS:
            return place
    return len(path) + 1


def orders_of(
    path: tuple[str, ...], standings: Mapping[str, Standing], *, head_keeps: bool
) -> list[ResumeOrder]:
    """What every place does, from 0 to n + 1 (rules 2 and 3).

    Args:
        path: with stand-ins, of whose standing nothing is known.
        head_keeps: whether the data peer keeps the gradient of the loss.
    """
    kept, head = first_kept(path, standings), len(path) + 1
    needs = {
        place
        for place, relay in enumerate(path[: kept - 1], 1)
        if standings.get(relay) is not Standing.WAITS
    }
    if kept == head and not head_keeps:
        needs.add(head)
    orders = []
    for place in range(head + 1):
        until = 0
        if place not in needs:
            until = _end_of_run(needs, place + 1)
        orders.append(ResumeOrder(place, until, returns=place == kept and place not in needs))
    return orders


def _end_of_run(needs: set[int], start: int) -> int:
    """The last of the neighbouring places from `start` on that are needed; 0 for none."""
    place = start
    while place in needs:
        place += 1
    return place - 1 if place > start else 0


# --- at the data peer -----------------------------------------------------------------------------
MENDS: Final = 16
"""Times that a microbatch is mended on its way back, at most."""


@dataclass(slots=True)
class Mending:
    """The answers of the relays that were halted.

    Attributes:
        asked: relays that have not answered.
        silent: those of them that could not be asked, and are to be asked again.
    """

    asked: set[str]
    silent: set[str] = field(default_factory=set)
    standings: dict[str, Standing] = field(default_factory=dict)


@dataclass(slots=True)
class Away:
    """A microbatch on its way.

    Attributes:
        since_s: when it set out first.
        without: whether a stage had nobody when it set out.
        setouts: how often it has set out, each time under a new name.
        nearly_home: whether its gradient has come as far as its last hop.
        turned: whether it has come to the loss: stages may have added its gradient.
        finishing: whether the trainer is at the loss.
        home: whether its gradient is here.
        slot: where it lies, produced once more, while it waits for another path; None else.
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
    path: Path
    since_s: float
    leg: Leg
    without: bool = False
    setouts: int = 1
    nearly_home: bool = False
    turned: bool = False
    finishing: bool = False
    home: bool = False
    slot: int | None = None
    attempt: int = 0
    mending: Mending | None = None
    gone: frozenset[str] = frozenset()
    until: int = 0
    returns: bool = True
    distrusted: set[str] = field(default_factory=set)
    accusers: set[str] = field(default_factory=set)

    def is_due(self, trip: Trip) -> bool:
        """Whether a trip is of the present attempt, and not of one that is halted."""
        is_for_this = (trip.leg is Leg.SCORE) == (self.leg is Leg.SCORE)
        is_present = trip.attempt == self.attempt and self.mending is None
        return is_for_this and is_present and not self.home

    @property
    def can_be_mended(self) -> bool:
        """Whether stages may have added its gradient, and its end is still open."""
        return self.turned and not self.home

    def trip(self, place: int, leg: Leg = Leg.FORWARD, until: int = 0) -> Trip:
        """A move of its present attempt."""
        return Trip(self.microbatch, leg, self.path, place, self.attempt, until)

    def lost(self) -> Tell:
        """What the relays of its path are told when it does not go on over them."""
        return Tell(self.path.relays, Lost(self.microbatch, self.attempt))


class Mender:
    """Halts microbatches, finds stand-ins, and says who does what once more.

    Args:
        relays: those that are there.
        kept: how many gradients of the loss are kept at once, after they have been sent.
        counts: where it is counted.
    """

    def __init__(self, relays: RelaysThere, kept: int, counts: Counter[Counted]) -> None:
        self._relays = relays
        self._counts = counts
        self.kept = KeptGradients(kept)

    def blamed(self, away: Away, by: str, told: Lost) -> None:
        """A relay names another of the path, that has failed.

        Where it has refused that one's gradient, its word stands against the other's. So it is
        believed once for each microbatch: who refuses those of two relays is the odd one itself.
        """
        relay, path = told.failed, away.path.relays
        if relay is None or relay not in path:
            return
        if told.refused and away.turned and path.index(relay) > path.index(by):
            if by in away.accusers:
                relay = by
            else:
                away.accusers.add(by)
                away.distrusted.add(relay)
        self._relays.failed.add(relay)

    def mend(self, away: Away) -> list[Command]:
        """Halt it; the caller sees to it that it is not mended for ever."""
        away.attempt += 1
        living = tuple(relay for relay in away.path.relays if relay in self._relays.all)
        away.mending, away.returns, away.until = Mending(set(living)), False, 0
        away.nearly_home = False
        return [Tell(living, Halt(away.microbatch, away.attempt)), *self.go_on(away)]

    def found(
        self, away: Away, attempt: int, relay: str, standing: Standing | None
    ) -> list[Command]:
        """A relay that was halted has said where it stands; None when it has not answered."""
        mending = away.mending
        if mending is None or attempt != away.attempt:
            return []
        if standing is None:
            mending.silent.add(relay)
            return []
        if relay in mending.asked:
            mending.asked.remove(relay)
            mending.standings[relay] = standing
        return self.go_on(away)

    def look_around(self, away: Away) -> list[Command]:
        """Some relays may be gone, or have come."""
        mending, there = away.mending, self._relays.all
        if mending is None:
            return []
        mending.asked.intersection_update(there)
        mending.standings = {r: s for r, s in mending.standings.items() if r in there}
        return self.go_on(away)

    def go_on(self, away: Away) -> list[Command]:
        """When all have answered: say who does what once more."""
        if away.mending is None or away.mending.asked:
            return []
        standings = {
            relay: Standing.NOTHING if relay in away.distrusted else standing
            for relay, standing in away.mending.standings.items()
        }
        away.mending = None
        before = away.path.relays
        kept = first_kept(before, standings)
        gone = frozenset(before[kept - 1 :]) - standings.keys()
        self._counts[Counted.GONE] += len(gone - away.gone)
        away.gone = gone
        if not self._replace(away, kept, standings):
            away.mending = Mending(set(), standings=standings)  # until somebody comes
            return []
        self._counts[Counted.MENDED] += away.path.relays != before
        replaced = tuple(self._relays.all.intersection(before).difference(away.path.relays))
        told = Tell(replaced, Lost(away.microbatch, away.attempt))
        return [*([told] if replaced else []), *self._resume(away, standings)]

    def _replace(self, away: Away, kept: int, standings: Mapping[str, Standing]) -> bool:
        """Find stand-ins for the relays before the gradient that is kept. Returns if it can be."""
        path = list(away.path.relays)
        for place, relay in enumerate(path[: kept - 1], 1):
            is_there, may_go = relay in self._relays.all, standings.get(relay) in REPLACEABLE
            if is_there and not (may_go and relay in self._relays.failed):
                continue
            stage = away.path.stages[place - 1]
            other = self._relays.stand_in(stage, path, away.microbatch.index + away.attempt + place)
            if other is None and not is_there:
                return False
            path[place - 1] = other or relay
        away.path = replace(away.path, relays=tuple(path))
        return True

    def _resume(self, away: Away, standings: Mapping[str, Standing]) -> list[Command]:
        """Tell everybody what to do."""
        keeps = away.finishing or away.microbatch in self.kept
        commands: list[Command] = []
        for order in orders_of(away.path.relays, standings, head_keeps=keeps):
            trip = away.trip(order.place, until=order.until)
            if order.place == 0 and order.until:
                away.until = order.until
                commands.append(Resend(away.number))
            elif standings.get(trip.receiver) in (Standing.WAITS, Standing.KEEPS):
                commands.append(Tell((trip.receiver,), Resume(trip, order.returns)))
            elif order.place > len(away.path.relays) and order.returns:
                away.returns = True
                commands += self.kept.send(trip.back())
        return commands
