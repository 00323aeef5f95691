"""The core of a relay: what it takes, what it works on, and when it steps. No clock, no I/O.

Theory. A relay holds one stage and works for data peers. Its trainer keeps the graph of every
forward until the gradient comes back, so a relay takes no more microbatches than it has slots for,
and its weights must be the same at both moments. So training goes in *iterations*, which the data
peers number and the relays keep apart:

  1. A data peer announces an iteration to every relay when nothing of the ones before is under
     way for it. A relay answers with the newest iteration that it has heard of, and a data peer
     that is behind goes on there: nobody hands out numbers.
  2. An offer of a forward waits until its iteration is the present one and a slot is free; the
     answer *is* the credit. A forward of a past iteration is refused (`behind`), a full queue is
     `busy`, and costs nothing. Gradients of what is held are welcome at any time.
  3. The iteration is over when every data peer that trains has announced a later one. Then the
     relay steps; it is in the next iteration when the trainer has stepped. Until then a microbatch
     that was lost elsewhere may still come by. At the end of the run, when there is no data peer
     left that trains, it is over as well.
  4. What cannot come any more must not be waited for: after `patience_s` the relay steps with what
     is there, and forgets what it holds. A gradient that comes then is refused: late, and counted.
     Of what a relay forgets it tells the data peer, which then waits for it no longer.
  5. A microbatch holds a slot at every relay that it has passed while it waits for the next one.
     Where paths go back to lower stages, some slots are left to those that are nearer to their
     end: a microbatch with c descents ahead of it (paths.py) gets a slot only while for each d from
     0 to c fewer than slots - d are held that have d or more ahead.

Invariants: a microbatch's gradient counts once at most (it is held once, and its name is refused
while it is held or after it is done); at most `slots` are held; an iteration that all data peers
announced ends, for its forwards need only the same iteration elsewhere, no later one takes their
slots, and slots are not waited for in a circle. The last follows from rule 5: let (-c, stage) be
the rank of a slot that a microbatch takes with c descents ahead. Along a path ranks rise. If one
with c ahead waits for a slot, then for some d up to c just slots - d are held with d or more ahead;
rule 5 lets fewer than that be held with more than c ahead, so the holder of one of them has c or
fewer, and if it waits, it waits for a higher rank. So among all that wait, those with the highest
rank wait for one that does not. (Dally and Seitz keep packets from blocking each other in a circle
by such an order of channels: IEEE Trans. Computers C-36(5), 1987.)
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from protocol.outcomes import RefusalReason

from .commands import (
    Answer,
    Command,
    Compute,
    FinishIteration,
    Forget,
    FreeInbound,
    Release,
    Send,
    TellLost,
)
from .counts import Counted
from .trip import Leg, Microbatch, Trip

MAX_WAITING: Final = 256
"""Offers without an answer at once."""


@dataclass(slots=True)
class _Held:
    """A microbatch with a slot. `trip` is the forward that brought it."""

    number: int
    trip: Trip
    computes: bool = False


@dataclass(frozen=True, slots=True)
class _Offer:
    ticket: int
    trip: Trip


class RelayCore:
    """See the top of the file. Every event returns what is to be done.

    Args:
        slots: microbatches held at once.
        patience_s: longest time for an iteration.

    Attributes:
        iteration: the present one; None before the first announcement.
        counts: since the start.
    """

    def __init__(self, slots: int, patience_s: float) -> None:
        self._slots = slots
        self._patience_s = patience_s
        self._held: dict[Microbatch, _Held] = {}
        self._waiting: list[_Offer] = []
        self._announced: dict[str, int] = {}
        self._done: set[Microbatch] = set()
        self._present: tuple[str, ...] = ()
        self._began_s = 0.0
        self._finishing = self._ended = False
        self._next_number = 0
        self.iteration: int | None = None
        self.counts: Counter[Counted] = Counter()

    def __repr__(self) -> str:
        return (
            f"<RelayCore in iteration {self.iteration}: {len(self._held)} held,"
            f" {len(self._waiting)} waiting>"
        )

    # --- what peers say ---------------------------------------------------------------------------
    def announced(self, origin: str, iteration: int, now_s: float) -> list[Command]:
        """A data peer has come to an iteration."""
        self._announced[origin] = max(iteration, self._announced.get(origin, 0))
        if self.iteration is None:
            self.iteration, self._began_s = iteration, now_s
        return self._advance(now_s)

    @property
    def newest(self) -> int:
        """The newest iteration that has been heard of."""
        return max(self._announced.values(), default=0)

    def present(self, origins: Iterable[str], now_s: float, *, ended: bool) -> list[Command]:
        """The data peers that train.

        Args:
            ended: whether there are data peers, and all have come to the end of the run.
        """
        self._present, self._ended = tuple(origins), ended
        for gone in self._announced.keys() - set(self._present):
            del self._announced[gone]
        return self._advance(now_s)

    def lost(self, microbatch: Microbatch, sender: str, now_s: float) -> list[Command]:
        """A data peer has given up a microbatch of its own, or sends it another way."""
        if sender != microbatch.origin:
            return []
        offers = [offer for offer in self._waiting if offer.trip.microbatch == microbatch]
        commands: list[Command] = []
        for offer in offers:
            self._waiting.remove(offer)
            commands.append(Answer(offer.ticket, RefusalReason.UNAVAILABLE))
        held = self._held.get(microbatch)
        if held is None:
            return commands
        self.counts[Counted.LOST] += 1
        return [*commands, Forget(held.number), *self._settle(microbatch, now_s)]

    def offered(self, ticket: int, trip: Trip) -> list[Command]:
        """A boundary is offered; it is answered now, or when its time has come."""
        if trip.leg is Leg.BACKWARD:
            held = self._held.get(trip.microbatch)
            if held is not None and held.trip.path == trip.path:
                return [Answer(ticket)]
            self.counts[Counted.LATE] += 1
            return [Answer(ticket, RefusalReason.UNAVAILABLE)]
        fault = self._fault(trip)
        if fault is not None:
            return [Answer(ticket, fault)]
        if len(self._waiting) >= MAX_WAITING:
            self.counts[Counted.BUSY] += 1
            return [Answer(ticket, RefusalReason.BUSY)]
        self._waiting.append(_Offer(ticket, trip))
        return self._grant()

    def _fault(self, trip: Trip) -> RefusalReason | None:
        """Why this can never come on its way forward; None when it can."""
        if trip.descents_ahead >= self._slots:
            return RefusalReason.UNAVAILABLE
        if trip.leg is Leg.SCORE:
            return None
        if self.iteration is not None and self._is_past(trip):
            return RefusalReason.BEHIND
        known = trip.microbatch in self._held or trip.microbatch in self._done
        return RefusalReason.TWICE if known else None

    def withdrawn(self, ticket: int) -> list[Command]:
        """An offer that waits is no longer there."""
        self._waiting = [offer for offer in self._waiting if offer.ticket != ticket]
        return []

    def arrived(self, trip: Trip, slot: int, loss: float | None) -> list[Command]:
        """What was welcome lies in this inbound slot."""
        held = self._held.get(trip.microbatch)
        if held is None:
            return [FreeInbound(slot)]
        held.computes = True
        return [Compute(trip.leg, held.number, slot, loss)]

    def broke_off(self, trip: Trip, now_s: float) -> list[Command]:
        """What was welcome has not come whole."""
        held = self._held.get(trip.microbatch)
        if trip.leg is Leg.BACKWARD or held is None or held.computes:
            return []
        return self._settle(trip.microbatch, now_s)

    # --- what the trainer says --------------------------------------------------------------------
    def produced(
        self,
        leg: Leg,
        number: int,
        slot: int,
        loss: float | None,
        now_s: float,
    ) -> list[Command]:
        """The trainer has made what goes on."""
        held = next((held for held in self._held.values() if held.number == number), None)
        if held is None:
            return [Release(slot)]
        return [Send(replace(held.trip, leg=leg).onward(), slot, loss)]

    def returned(self, number: int, now_s: float) -> list[Command]:
        """The trainer has added a microbatch's gradient."""
        for microbatch, held in self._held.items():
            if held.number == number:
                self.counts[Counted.DONE] += 1
                return self._settle(microbatch, now_s)
        return []

    def sent(self, trip: Trip, now_s: float, *, taken: bool) -> list[Command]:
        """What was to be sent has been taken by the other, or has not."""
        held = self._held.get(trip.microbatch)
        if held is None:
            return []
        if trip.leg is Leg.SCORE:
            self.counts[Counted.SCORED] += taken
            return self._settle(trip.microbatch, now_s)
        if taken or trip.leg is Leg.BACKWARD:
            return []
        self.counts[Counted.LOST] += 1
        lost: list[Command] = [Forget(held.number), TellLost(trip.microbatch)]
        return [*lost, *self._settle(trip.microbatch, now_s)]

    def stepped(self, now_s: float) -> list[Command]:
        """The trainer has stepped."""
        assert self.iteration is not None, "a step belongs to an iteration"
        ahead = [it for o, it in self._announced.items() if o in self._present]
        self.iteration = max(self.iteration + 1, min(ahead, default=0))
        self._began_s, self._finishing = now_s, False
        self._done.clear()
        stale = [offer for offer in self._waiting if self._is_past(offer.trip)]
        self._waiting = [offer for offer in self._waiting if not self._is_past(offer.trip)]
        answers = [Answer(offer.ticket, RefusalReason.BEHIND) for offer in stale]
        return [*answers, *self._advance(now_s)]

    def restarted(self) -> list[Command]:
        """The trainer is a new one, and holds nothing."""
        lost: list[Command] = [TellLost(microbatch) for microbatch in self._held]
        self.counts[Counted.LOST] += len(lost)
        self._held.clear()
        self._finishing = False
        return [*lost, *self._grant()]

    def ticked(self, now_s: float) -> list[Command]:
        """Time has passed."""
        return self._advance(now_s)

    # --- decisions --------------------------------------------------------------------------------
    def _advance(self, now_s: float) -> list[Command]:
        """Give credit, and end the iteration if it is over."""
        commands = self._grant()
        if self.iteration is None or self._finishing:
            return commands
        if not self._present:
            self._began_s = now_s
        if self._is_over(now_s):
            self._finishing = True
            return [*commands, *self._forget_all(), FinishIteration()]
        return commands

    def _is_over(self, now_s: float) -> bool:
        """Whether nothing more of the iteration is waited for (rules 3 and 4)."""
        if not self._present:
            return self._ended
        if all(self._has_ended(origin) for origin in self._present):
            return True
        return now_s - self._began_s >= self._patience_s

    def _has_ended(self, origin: str) -> bool:
        """Whether nothing of this data peer is to come in this iteration (rule 3)."""
        assert self.iteration is not None
        return self._announced.get(origin, 0) > self.iteration

    def _forget_all(self) -> list[Command]:
        """What is held still has been given up by its data peer, or by us."""
        forgotten = [m for m, held in self._held.items() if held.trip.leg is Leg.FORWARD]
        self.counts[Counted.LOST] += len(forgotten)
        commands: list[Command] = []
        for microbatch in forgotten:
            commands += [Forget(self._held.pop(microbatch).number), TellLost(microbatch)]
        return commands

    def _settle(self, microbatch: Microbatch, now_s: float) -> list[Command]:
        """Nothing of this microbatch is held any more."""
        held = self._held.pop(microbatch)
        if held.trip.leg is Leg.FORWARD:
            self._done.add(microbatch)
        return self._advance(now_s)

    def _grant(self) -> list[Command]:
        """Credit for the offers whose time has come, the oldest first."""
        granted: list[Command] = []
        for offer in list(self._waiting):
            if len(self._held) >= self._slots:
                break
            trip = offer.trip
            if not self._has_slot(trip.descents_ahead):
                continue  # one that is nearer to its end may have it
            due = trip.microbatch.iteration == self.iteration and not self._finishing
            if not due and trip.leg is not Leg.SCORE:
                continue
            self._waiting.remove(offer)
            if trip.microbatch in self._held:
                granted.append(Answer(offer.ticket, RefusalReason.TWICE))
                continue
            self._held[trip.microbatch] = _Held(self._next_number, trip)
            self._next_number += 1
            granted.append(Answer(offer.ticket))
        return granted

    def _has_slot(self, ahead: int) -> bool:
        """Whether a microbatch with so many descents ahead of it may take a slot (rule 5)."""
        held = [each.trip.descents_ahead for each in self._held.values()]
        return all(
            sum(each >= least for each in held) < self._slots - least for least in range(ahead + 1)
        )

    def _is_past(self, trip: Trip) -> bool:
        assert self.iteration is not None
        return trip.leg is Leg.FORWARD and trip.microbatch.iteration < self.iteration
