"""Mending, at a data peer: halts a microbatch, finds stand-ins, and says who does what once more.

Why and how stands in mending.py.
"""

from collections import Counter
from dataclasses import replace
from typing import Final

from .away import Away, RelaysThere
from .core import (
    Command,
    Counted,
    HaltRelays,
    ResumeRelay,
    SendBoundary,
    TellLost,
)
from .mending import (
    KEPT_PER_SLOT,
    REPLACEABLE,
    KeptGradients,
    Mending,
    Standing,
    first_kept,
    orders_of,
)
from .trainer_messages import Release, Resend
from .trip import Leg, Trip

MENDS: Final = 16
"""Times that a microbatch is mended on its way back, at most."""


class Mender:
    """See the top of the file.

    Args:
        relays: those that are there.
        kept: how many gradients of the loss are kept at once, after they have been sent.
        counts: where it is counted.
    """

    def __init__(self, relays: RelaysThere, kept: int, counts: Counter[Counted]) -> None:
        self._relays = relays
        self._counts = counts
        self._resent: Counter[int] = Counter()
        self.kept = KeptGradients(kept)

    def clear(self, slots: int) -> None:
        """The trainer is a new one, with room for so many."""
        self.kept.clear(KEPT_PER_SLOT * slots)
        self._resent.clear()

    def blamed(self, away: Away, by: str, told: TellLost) -> None:
        """A relay names another of the path, that has failed.

        Where it has refused that one's gradient, its word stands against the other's. So it is
        believed once for each microbatch: who refuses those of two relays is the odd one itself.
        """
        relay, path = told.failed, away.path
        if relay is None or relay not in path:
            return
        if told.refused and away.turned and path.index(relay) > path.index(by):
            if by in away.accusers:
                relay = by
            else:
                away.accusers.add(by)
                away.distrusted.add(relay)
        self._relays.failed.add(relay)

    def refused_here(self, away: Away | None, trip: Trip) -> None:
        """What has come to us cannot be right."""
        self._counts[Counted.REFUSED] += 1
        self._relays.failed.add(trip.sender)
        if away is not None and trip.leg is Leg.BACKWARD:
            away.distrusted.add(trip.sender)

    def mend(self, away: Away) -> list[Command]:
        """Halt it; the caller sees to it that it is not mended for ever."""
        away.attempt += 1
        living = tuple(relay for relay in away.path if relay in self._relays.all)
        away.mending, away.returns, away.until = Mending(set(living)), False, 0
        away.nearly_home = False
        return [HaltRelays(away.microbatch, away.attempt, living), *self.go_on(away)]

    def found(
        self, away: Away, attempt: int, relay: str, standing: Standing | None
    ) -> list[Command]:
        """A relay that was halted has said where it stands; None when it has not answered."""
        if away.mending is None or attempt != away.attempt:
            return []
        if standing is None:
            away.mending.silent.add(relay)
            return []
        away.mending.found(relay, standing)
        return self.go_on(away)

    def look_around(self, away: Away) -> list[Command]:
        """Some relays may be gone, or have come."""
        if away.mending is None:
            return []
        away.mending.only(self._relays.all)
        return self.go_on(away)

    def ask_again(self, away: Away) -> list[Command]:
        """Halt it at those that have not answered."""
        if away.mending is None or not away.mending.silent:
            return []
        silent = tuple(sorted(away.mending.silent & away.mending.asked))
        away.mending.silent.clear()
        return [HaltRelays(away.microbatch, away.attempt, silent)]

    def is_stranded(self, away: Away, now_s: float) -> bool:
        """Whether it waits for a stand-in in a stage that has long had nobody."""
        waits = away.mending is not None and not away.mending.asked
        return waits and self._relays.are_long_gone(away.way.stages, now_s)

    def go_on(self, away: Away) -> list[Command]:
        """When all have answered: say who does what once more."""
        if away.mending is None or away.mending.asked:
            return []
        standings = {
            relay: Standing.NOTHING if relay in away.distrusted else standing
            for relay, standing in away.mending.standings.items()
        }
        away.mending = None
        kept = first_kept(away.path, standings)
        gone = frozenset(away.path[kept - 1 :]) - standings.keys()
        self._counts[Counted.GONE] += len(gone - away.gone)
        away.gone = gone
        before = away.path
        if not self._replace(away, kept, standings):
            away.mending = Mending(set(), standings=standings)  # until somebody comes
            return []
        self._counts[Counted.MENDED] += away.path != before
        replaced = tuple(self._relays.all.intersection(before).difference(away.path))
        told = TellLost(away.microbatch, replaced, away.attempt)
        return [*([told] if replaced else []), *self._resume(away, standings)]

    def _replace(self, away: Away, kept: int, standings: dict[str, Standing]) -> bool:
        """Find stand-ins for the relays before the gradient that is kept. Returns if it can be."""
        path = list(away.path)
        for place, relay in enumerate(away.path[: kept - 1], 1):
            is_there, may_go = relay in self._relays.all, standings.get(relay) in REPLACEABLE
            if is_there and not (may_go and relay in self._relays.failed):
                continue
            stage = away.way.stages[place - 1]
            other = self._relays.stand_in(stage, path, away.microbatch.index + away.attempt + place)
            if other is None and not is_there:
                return False
            path[place - 1] = other or relay
        away.way = replace(away.way, relays=tuple(path))
        return True

    def _resume(self, away: Away, standings: dict[str, Standing]) -> list[Command]:
        """Tell everybody what to do."""
        first = Trip.begin(away.microbatch, Leg.FORWARD, away.way, 0, away.attempt)
        keeps = away.finishing or away.microbatch in self.kept
        commands: list[Command] = []
        for order in orders_of(away.path, standings, head_keeps=keeps):
            trip = replace(first, place=order.place, until=order.until)
            if order.place == 0 and order.until:
                away.until = order.until
                self._resent[away.number] += 1
                commands.append(Resend(away.number))
            elif standings.get(trip.receiver) in (Standing.WAITS, Standing.KEEPS):
                commands.append(ResumeRelay(trip, order.returns))
            elif order.place > len(away.path) and order.returns:
                away.returns = True
                commands += self._send_back(away)
        return commands

    def owes(self, number: int) -> bool:
        """Whether the trainer produces the activations of this one once more, to be mended."""
        return self._resent[number] > 0

    def send_once_more(self, away: Away | None, number: int, slot: int) -> list[Command]:
        """The trainer has produced activations for a microbatch that goes on."""
        self._resent[number] -= 1
        if away is None or away.mending is not None or not away.until:
            return [Release(slot)]
        trip = Trip.begin(away.microbatch, Leg.FORWARD, away.way, 1, away.attempt)
        until, away.until = away.until, 0
        return [SendBoundary(replace(trip, until=until), slot, None)]

    def turn(self, away: Away, slot: int, loss: float | None) -> list[Command]:
        """The trainer has made the gradient of a loss."""
        away.finishing = False
        commands = self.kept.keep(away.microbatch, slot, loss)
        return [*commands, *(self._send_back(away) if away.returns else [])]

    def _send_back(self, away: Away) -> list[Command]:
        """Send the gradient of the loss, if it is there."""
        place = len(away.path)
        trip = Trip.begin(away.microbatch, Leg.BACKWARD, away.way, place, away.attempt)
        return self.kept.send(trip)
