"""The core of a relay: what it takes, what it works on, and when it steps. No clock, no I/O.

Theory. A relay holds one stage and works for data peers. Its trainer keeps the graph of every
forward until the gradient comes back, so a relay takes no more microbatches than it has slots for,
and its weights must be the same at both moments. So training goes in *iterations*, which the data
peers number and the relays keep apart:

  1. A data peer announces an iteration to every relay when nothing of the ones before is under
     way for it, and says so once: it stands (iterations.py). A relay answers where the others are
     (`newest_for`), and one that is behind goes on there, by a bounded leap: nobody hands out
     numbers.
  2. An offer of a forward waits until its iteration is the present one and a slot is free; the
     answer *is* the credit. A forward of a past iteration is refused (`behind`), a full queue is
     `busy`, and costs nothing. Gradients of what is held are welcome at any time, in each attempt
     one at once: a repeated offer is refused (`twice`).
  3. The iteration is over when every data peer that trains has announced a later one. Then the
     relay steps; it is in the next iteration when the trainer has stepped. Until then a microbatch
     that was lost elsewhere may still come by. At the end of the run, when there is no data peer
     left that trains, it is over as well.
  4. The gradient that a relay has sent stays in its slot until the receiver's own has been taken
     by the next. A microbatch that has lost a relay is halted by its data peer and goes on as
     that says (mending.py); what belongs to an earlier attempt is refused.
  5. What cannot come any more must not be waited for: after `patience_s`, or sooner where others
     are through (iterations.py), the relay steps with what is there, and forgets what it holds. A
     gradient that comes then is refused: late, and counted. Of what a relay forgets it tells the
     data peer, which then waits for it no longer. What belongs to a data peer that is gone is
     forgotten soon, and its offers are refused: the next one needs the slots (GONE_S, below).
     A score belongs to no iteration. It goes through once: it is never halted, no gradient is taken
     for it, and it is forgotten after `patience_s`.
  6. A microbatch holds a slot at every relay that it has passed while it waits for the next one.
     Where paths go back to lower stages, some slots are left to those that are nearer to their
     end: a microbatch with c descents ahead of it (paths.py) gets a slot only while for each d from
     0 to c fewer than slots - d are held that have d or more ahead.
  7. What comes and cannot be right (sizes.py) is refused. Its data peer is told at once who sent
     it, and has the microbatch go another way.

Invariants: a microbatch's gradient counts once at most (it is held once, its name is refused after
it is done, and in a later attempt it is computed without being added); at most `slots` are held; an
iteration that all data peers announced ends, for its forwards need only the same iteration
elsewhere, no later one takes their slots, and slots are not waited for in a circle. The last
follows from rule 6: let (-c, stage) be the rank of a slot that a microbatch takes with c descents
ahead. Along a path ranks rise. If one with c ahead waits for a slot, then for some d up to c just
slots - d are held with d or more ahead; rule 6 lets fewer than that be held with more than c ahead,
so the holder of one of them has c or fewer, and if it waits, it waits for a higher rank. So among
all that wait, those with the highest rank wait for one that does not. (Dally and Seitz keep packets
from blocking each other in a circle by such an order of channels: IEEE Trans. Computers C-36(5),
1987.) A microbatch that is mended may hold slots beyond the one that it waits for; its gradient
frees those, and waits for no slot before it is there.

The data peers that are gone, and have left microbatches at a relay.

A link that breaks may be back in a moment, and with it the data peer, which waits for what is its
own. So one that is not there is taken for gone when it has been away for GONE_S. Its microbatches
need no slot then: nobody sends their gradients, and those of others wait for the slots.

The offers to a relay that wait for their answer: for a slot, or for their iteration.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from protocol.outcomes import RefusalReason

from .core import (
    AnswerOffer,
    Command,
    Counted,
    FreeInbound,
    SendBoundary,
    TellLost,
    TellPassed,
)
from .iterations import PresentIteration
from .ledger import Ledger
from .mending import KEPT, KEPT_PER_SLOT, Standing
from .trainer_messages import Deliver, Drop, Finish, Release, Resend
from .trip import Leg, Microbatch, Trip

# --- data peers that are gone ---------------------------------------------------------------------
GONE_S: Final = 10.0
"""A data peer that loses a link to a relay sends what it had there another way at once."""


class Departed:
    """See the top of the file."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def look(self, origins: Collection[str], alive: Collection[str], now_s: float) -> set[str]:
        """The data peers that have left microbatches here, and will not come for them.

        Args:
            origins: those that have microbatches here.
            alive: all data peers that are there.
        """
        away = set(origins).difference(alive)
        self._since_s = {each: self._since_s.get(each, now_s) for each in away}
        return {each for each, since_s in self._since_s.items() if now_s - since_s >= GONE_S}


# --- offers that wait -----------------------------------------------------------------------------
MAX_WAITING: Final = 256
"""Offers without an answer at once."""


@dataclass(frozen=True, slots=True)
class WaitingOffer:
    """An offer without an answer."""

    ticket: int
    trip: Trip


class WaitingOffers:
    """See the top of the file. Iterating goes over them, the oldest first, mended ones before."""

    def __init__(self) -> None:
        self._offers: list[WaitingOffer] = []

    def __len__(self) -> int:
        return len(self._offers)

    def __iter__(self) -> Iterator[WaitingOffer]:
        return iter(sorted(self._offers, key=lambda offer: not offer.trip.attempt))

    @property
    def is_full(self) -> bool:
        """Whether a further one has to be sent away."""
        return len(self) >= MAX_WAITING

    def add(self, offer: WaitingOffer) -> None:
        """A further one waits."""
        self._offers.append(offer)

    def remove(self, offer: WaitingOffer) -> None:
        """One is answered."""
        self._offers.remove(offer)

    def withdraw(self, ticket: int) -> None:
        """One is no longer there; nothing happens where it was answered."""
        self._offers = [offer for offer in self._offers if offer.ticket != ticket]

    def take(self, which: Callable[[Trip], bool]) -> list[WaitingOffer]:
        """Those with such trips, which wait no longer."""
        taken = [offer for offer in self._offers if which(offer.trip)]
        self._offers = [offer for offer in self._offers if not which(offer.trip)]
        return taken


# --- the core -------------------------------------------------------------------------------------
MAX_HALTED: Final = 1024
"""Microbatches of an iteration that have been halted."""


class RelayCore:
    """See the top of the file. Every event returns what is to be done.

    Args:
        slots: microbatches held at once, until a trainer says otherwise.
        patience_s: longest time for an iteration.
        kept: gradients kept at once, after they have been sent.

    Attributes:
        counts: since the start.
    """

    def __init__(self, slots: int, patience_s: float, kept: int = KEPT) -> None:
        self._slots, self._patience_s = slots, patience_s
        self._present = PresentIteration(patience_s)
        self._ledger = Ledger(kept)
        self._waiting = WaitingOffers()
        self._departed = Departed()
        self.counts: Counter[Counted] = Counter()

    # --- what peers say ---------------------------------------------------------------------------
    def announced(self, origin: str, iteration: int, now_s: float) -> list[Command]:
        """A data peer has come to an iteration."""
        self._present.announced(origin, iteration, now_s)
        return self._advance(now_s)

    def microbatch_of(self, number: int) -> Microbatch | None:
        """What the trainer knows by this number, while it is held."""
        held = self._ledger.numbered(number)
        return None if held is None else held.trip.microbatch

    @property
    def iteration(self) -> int | None:
        """The present one; None before the first announcement."""
        return self._present.number

    def newest_for(self, origin: str) -> int:
        """Where the data peers beside this one are, and no earlier than where we are."""
        return self._present.newest_for(origin)

    def present(
        self, origins: Iterable[str], now_s: float, *, ended: bool, alive: Iterable[str] = ()
    ) -> list[Command]:
        """The data peers that train.

        Args:
            ended: whether there are data peers, and all have come to the end of the run.
            alive: those that are there and do not train.
        """
        self._present.look(origins, ended=ended)
        commands = self._part_from_gone({*alive, *self._present.origins}, now_s)
        return [*commands, *self._advance(now_s)]

    def lost(
        self, microbatch: Microbatch, sender: str, now_s: float, attempt: int = 0
    ) -> list[Command]:
        """A data peer has given up a microbatch of its own, or sends it another way."""
        if sender != microbatch.origin or attempt < self._ledger.attempt_of(microbatch):
            return []
        refused = self._refuse(
            lambda trip: trip.microbatch == microbatch and trip.attempt <= attempt
        )
        return [*refused, *self._let_go(microbatch, now_s)]

    def passed(self, microbatch: Microbatch, sender: str, attempt: int) -> list[Command]:
        """The one that we have sent a gradient has passed its own on; nobody needs ours again."""
        if attempt < self._ledger.attempt_of(microbatch):
            return []
        return self._ledger.kept.passed(microbatch, sender)

    def offered(self, ticket: int, trip: Trip) -> list[Command]:
        """A boundary is offered; it is answered now, or when its time has come."""
        refusal = self._ledger.refusal(trip, self.iteration)
        if trip.leg is not Leg.BACKWARD and trip.descents_ahead >= self._slots:
            refusal = RefusalReason.UNAVAILABLE
        if refusal is not None:
            self.counts[Counted.LATE] += trip.leg is Leg.BACKWARD
            return [AnswerOffer(ticket, refusal)]
        if trip.leg is Leg.BACKWARD and self._ledger.awaits(trip):
            return [AnswerOffer(ticket, self._ledger.welcome(trip))]
        if self._waiting.is_full:
            self.counts[Counted.BUSY] += 1
            return [AnswerOffer(ticket, RefusalReason.BUSY)]
        self._waiting.add(WaitingOffer(ticket, trip))
        return self._grant()

    def withdrawn(self, ticket: int) -> list[Command]:
        """An offer that waits is no longer there."""
        self._waiting.withdraw(ticket)
        return []

    def arrived(self, trip: Trip, slot: int, loss: float | None) -> list[Command]:
        """What was welcome lies in this inbound slot."""
        held = self._ledger.held.get(trip.microbatch)
        if held is not None and held.trip == trip and not held.computes:
            held.computes = True
            return [Deliver(trip.leg, held.number, slot, loss), *self._grant()]
        if held is None or trip.leg is not Leg.BACKWARD or not self._ledger.awaits(trip):
            return [FreeInbound(slot)]
        held.turned = held.returns = True
        return [Deliver(trip.leg, held.number, slot, loss, adds=held.adds)]

    def broke_off(self, trip: Trip, now_s: float, *, refused: bool = False) -> list[Command]:
        """What was welcome has not come whole, or was refused (rule 7)."""
        self.counts[Counted.REFUSED] += refused
        told = TellLost(trip.microbatch, (), trip.attempt, trip.sender, refused=True)
        commands: list[Command] = [told] if refused else []
        held = self._ledger.held.get(trip.microbatch)
        if held is not None and trip.leg is Leg.BACKWARD and held.welcomed == trip.attempt:
            held.welcomed = None
        if held is None or held.trip != trip or held.computes:
            return commands  # it is a gradient, of an attempt before, or here after all
        return [*commands, *self._settle(trip.microbatch, now_s)]

    # --- mending ----------------------------------------------------------------------------------
    def halted(
        self, microbatch: Microbatch, attempt: int, now_s: float
    ) -> tuple[Standing | None, list[Command]]:
        """Its data peer halts it (mending.py): where we stand; None when we cannot know."""
        ledger = self._ledger
        if self.iteration is not None and microbatch.iteration < self.iteration:
            return Standing.ADDED, []  # for all that can be known
        newest = ledger.attempts.get(microbatch)
        if ledger.is_score(microbatch):
            return None, []  # no data peer halts what nobody mends
        if attempt < (newest or 0) or (newest is None and len(ledger.attempts) >= MAX_HALTED):
            return None, []
        ledger.attempts[microbatch] = attempt
        commands = self._refuse(ledger.is_stale)
        standing, held = ledger.standing(microbatch), ledger.held.get(microbatch)
        if held is not None and not held.computes:
            return standing, [*commands, *self._settle(microbatch, now_s)]
        if held is not None:
            held.sends_on = held.returns = False
        return standing, commands

    def resumed(self, trip: Trip, *, returns: bool) -> list[Command]:
        """It goes on like this; see `Resume`."""
        ledger, microbatch = self._ledger, trip.microbatch
        if trip.attempt != ledger.attempts.get(microbatch) or ledger.is_score(microbatch):
            return []
        held, commands = ledger.held.get(microbatch), list[Command]()
        if held is not None and held.computes:
            held.trip = trip
            if trip.until and not held.turned:
                held.sends_on = True
                commands.append(Resend(held.number))
            held.returns = returns
        if returns and microbatch in ledger.kept:
            commands += ledger.kept.send(trip.back())
        elif returns and (held is None or not held.turned):
            commands.append(TellLost(microbatch, attempt=trip.attempt))
        return [*commands, *self._grant()]

    # --- what the trainer says --------------------------------------------------------------------
    def produced(
        self, leg: Leg, number: int, slot: int, loss: float | None, now_s: float
    ) -> list[Command]:
        """The trainer has made what goes on."""
        held = self._ledger.numbered(number)
        if held is None:
            return [Release(slot)]
        trip = held.trip
        if leg is Leg.BACKWARD:
            commands = self._ledger.kept.keep(trip.microbatch, slot, loss)
            return commands + self._ledger.kept.send(trip.back()) if held.returns else commands
        if not held.sends_on:
            return [Release(slot)]
        held.sends_on = False
        return [SendBoundary(replace(trip, leg=leg).onward(), slot, loss)]

    def returned(self, number: int, now_s: float) -> list[Command]:
        """The trainer has added a microbatch's gradient, if it was to."""
        held = self._ledger.numbered(number)
        if held is None:
            return []
        microbatch = held.trip.microbatch
        if held.adds:
            self._ledger.added.add(microbatch)
            self.counts[Counted.DONE] += 1
            self.counts[Counted.REPLAYED] += held.stands_in
        return self._settle(microbatch, now_s)

    def sent(self, trip: Trip, now_s: float, *, taken: bool) -> list[Command]:
        """What was to be sent has been taken by the other, or has not."""
        held = self._ledger.held.get(trip.microbatch)
        if trip.leg is Leg.BACKWARD and not self._ledger.is_stale(trip):
            return self._sent_back(trip, taken=taken)
        if held is None or trip.leg is Leg.BACKWARD:
            return []
        if trip.leg is Leg.SCORE:
            self.counts[Counted.SCORED] += taken
            lost = [] if taken else [TellLost(trip.microbatch, failed=trip.receiver)]
            return [*lost, *self._settle(trip.microbatch, now_s)]
        if taken or held.turned or self._ledger.is_stale(trip):
            return []  # with its gradient here it was taken, whatever became of the receipt
        told = TellLost(trip.microbatch, attempt=trip.attempt, failed=trip.receiver)
        if trip.attempt:
            return [told]
        self.counts[Counted.LOST] += 1
        return [Drop(held.number), told, *self._settle(trip.microbatch, now_s)]

    def stepped(self, now_s: float) -> list[Command]:
        """The trainer has stepped."""
        self._present.stepped(now_s)
        closing = self._ledger.close()
        return [*closing, *self._refuse(self._present.is_after), *self._advance(now_s)]

    def restarted(self, slots: int) -> list[Command]:
        """The trainer is a new one, holds nothing, and has room for so many."""
        ledger, self._slots = self._ledger, slots
        lost: list[Command] = [
            TellLost(microbatch, attempt=ledger.attempt_of(microbatch))
            for microbatch in dict.fromkeys([*ledger.held, *ledger.kept])
        ]
        self.counts[Counted.LOST] += sum(held.adds for held in ledger.held.values())
        self.counts[Counted.GONE] += len(ledger.added)
        ledger.held.clear()
        ledger.kept.clear(KEPT_PER_SLOT * slots)
        ledger.added.clear()
        self._present.is_finishing = False
        return [*lost, *self._grant()]

    def ticked(self, now_s: float) -> list[Command]:
        """Time has passed."""
        old = self._ledger.scores_held_for(self._patience_s, now_s)
        forgotten = [command for score in old for command in self._forget(score, now_s)]
        return [*forgotten, *self._advance(now_s)]

    # --- decisions --------------------------------------------------------------------------------
    def _refuse(self, which: Callable[[Trip], bool]) -> list[Command]:
        """Refuse offers that wait."""
        is_past = self._present.is_after
        return [
            AnswerOffer(
                offer.ticket,
                RefusalReason.BEHIND if is_past(offer.trip) else RefusalReason.UNAVAILABLE,
            )
            for offer in self._waiting.take(which)
        ]

    def _part_from_gone(self, alive: Collection[str], now_s: float) -> list[Command]:
        """Nothing is held for data peers that are gone (rule 5)."""
        ledger = self._ledger
        had = dict.fromkeys([*ledger.held, *ledger.kept])
        waiting = {offer.trip.microbatch.origin for offer in self._waiting}
        gone = self._departed.look({*waiting, *(each.origin for each in had)}, alive, now_s)
        commands = self._refuse(lambda trip: trip.microbatch.origin in gone)
        for microbatch in [each for each in had if each.origin in gone]:
            commands += self._forget(microbatch, now_s)
        return commands

    def _forget(self, microbatch: Microbatch, now_s: float) -> list[Command]:
        """Let a microbatch go, and say so."""
        told = TellLost(microbatch, attempt=self._ledger.attempt_of(microbatch))
        return [told, *self._let_go(microbatch, now_s)]

    def _let_go(self, microbatch: Microbatch, now_s: float) -> list[Command]:
        """Neither hold nor keep anything of a microbatch."""
        commands, held = self._ledger.kept.drop(microbatch), self._ledger.held.get(microbatch)
        if held is None:
            return commands
        self.counts[Counted.LOST] += held.adds
        return [*commands, Drop(held.number), *self._settle(microbatch, now_s)]

    def _sent_back(self, trip: Trip, *, taken: bool) -> list[Command]:
        """After a gradient was taken, the one that we got it from may forget its own."""
        if not taken:
            return [TellLost(trip.microbatch, attempt=trip.attempt, failed=trip.receiver)]
        giver = replace(trip, leg=Leg.FORWARD, place=trip.place + 2).receiver
        return [TellPassed(trip.microbatch, giver, trip.attempt)]

    def _advance(self, now_s: float) -> list[Command]:
        """Give credit, and end the iteration if it is over."""
        commands = self._grant()
        if self._present.ends(now_s):
            return [*commands, *self._forget_all(), Finish()]
        return commands

    def _forget_all(self) -> list[Command]:
        """What is held still has been given up by its data peer, or by us."""
        commands: list[Command] = []
        for microbatch in [m for m, h in self._ledger.held.items() if h.trip.leg is Leg.FORWARD]:
            told = TellLost(microbatch, attempt=self._ledger.attempt_of(microbatch))
            held = self._ledger.held.pop(microbatch)
            self.counts[Counted.LOST] += held.adds
            commands += [Drop(held.number), told]
        return commands

    def _settle(self, microbatch: Microbatch, now_s: float) -> list[Command]:
        """Nothing of this microbatch is held any more."""
        held = self._ledger.held.pop(microbatch)
        if held.trip.leg is Leg.FORWARD:
            self._ledger.ended.add(microbatch)
        return self._advance(now_s)

    def _grant(self) -> list[Command]:
        """Credit for the offers whose time has come, the oldest first, mended ones before."""
        granted: list[Command] = []
        for offer in self._waiting:
            trip = offer.trip
            if trip.leg is Leg.BACKWARD:
                is_due = self._ledger.awaits(trip)
            else:
                is_due = self._present.is_of(trip) and self._ledger.has_slot(trip, self._slots)
            if not is_due:
                continue
            self._waiting.remove(offer)
            granted.append(AnswerOffer(offer.ticket, self._ledger.welcome(trip)))
        return granted
