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
     forgotten soon, and its offers are refused: the next one needs the slots. (A link that breaks
     may be back in a moment, so it is taken for gone when it has been away for GONE_S.)
     A score belongs to no iteration. It goes through once: it is never halted, no gradient is taken
     for it, and it is forgotten after `patience_s`.
  6. A microbatch holds a slot at every relay that it has passed while it waits for the next one.
     Where paths go back to lower stages, some slots are left to those that are nearer to their
     end: a microbatch with c descents ahead of it gets a slot only while for each d from
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
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from protocol.errors import RemoteProtocolError
from protocol.outcomes import RefusalReason
from protocol.wire.messages import Refusal
from protocol.wire.stage_messages import (
    Announcement,
    Halt,
    Halted,
    Leg,
    Lost,
    Microbatch,
    Noted,
    Notice,
    Passed,
    Resume,
    Standing,
    Trip,
)

from .core import (
    MAX_REMEMBERED,
    AnswerOffer,
    Command,
    Counted,
    SendBoundary,
    StageCore,
    Tell,
)
from .iterations import PresentIteration
from .mending import KEPT, KEPT_PER_SLOT, KeptGradients
from .trainer_messages import Drop, Filled, Finish, Freed, Resend

GONE_S: Final = 10.0
"""A data peer that loses a link to a relay sends what it had there another way at once."""
MAX_WAITING: Final = 256
"""Offers without an answer at once."""


@dataclass(slots=True)
class HeldMicrobatch:
    """A microbatch with a slot.

    Attributes:
        trip: the forward that brought it, or how it goes on since.
        adds: whether its gradient is to be added; not where it has been, nor that of a score.
        stands_in: whether it came in place of a relay that is gone.
        standing: NOTHING until its activations are here, KEEPS from when its gradient is.
        welcomed: the attempt in which its gradient is welcome, and has not come; None before.
        sends_on: whether what the forward makes is to be sent.
        returns: whether what the backward makes is to be sent.
        seen_s: when it was seen to be held first; None before.
    """

    number: int
    trip: Trip
    adds: bool
    stands_in: bool
    sends_on: bool
    standing: Standing = Standing.NOTHING
    welcomed: int | None = None
    returns: bool = True
    seen_s: float | None = None


class RelayCore(StageCore):
    """See the top of the file. Every event returns what is to be done.

    Args:
        slots: microbatches held at once, until a trainer says otherwise.
        patience_s: longest time for an iteration.
        kept: gradients kept at once, after they have been sent.
    """

    def __init__(self, slots: int, patience_s: float, kept: int = KEPT) -> None:
        super().__init__()
        self._slots, self._patience_s = slots, patience_s
        self._present = PresentIteration(patience_s)
        self._waiting: dict[int, Trip] = {}
        self._held: dict[Microbatch, HeldMicrobatch] = {}
        self._kept = KeptGradients(kept)
        self._added: set[Microbatch] = set()  # in this iteration
        self._ended: set[Microbatch] = set()  # they do not come again in their first attempt
        self._halted: dict[Microbatch, int] = {}  # the newest attempt of each
        self._away_s: dict[str, float] = {}  # since when data peers are
        self._next_number = 0

    # --- what peers say ---------------------------------------------------------------------------
    def told(
        self, sender: str, message: Notice, now_s: float
    ) -> tuple[Noted | Halted | Refusal, list[Command]]:
        """A data peer, or the next relay of a path, says something. Returns the answer, too.

        Raises:
            RemoteProtocolError: it is not for the sender to say.
        """
        match message:
            case Announcement(iteration):
                commands = self.announced(sender, iteration, now_s)
            case Passed(microbatch, attempt):
                commands = self.passed(microbatch, sender, attempt)
            case Lost(microbatch, attempt):
                commands = self.lost(microbatch, sender, now_s, attempt)
            case Halt(microbatch, attempt):
                _check(microbatch, sender)
                standing, commands = self.halted(microbatch, attempt, now_s)
                if standing is None:
                    sentence = "a later attempt is known, or it is never mended"
                    return Refusal(RefusalReason.UNAVAILABLE, sentence), commands
                return Halted(standing), commands
            case Resume(trip, returns):
                _check(trip.microbatch, sender, trip.leg)
                commands = self.resumed(trip, returns=returns)
        return Noted(self.newest_for(sender)), commands

    def announced(self, origin: str, iteration: int, now_s: float) -> list[Command]:
        """A data peer has come to an iteration."""
        self._present.announced(origin, iteration, now_s)
        return self._advance(now_s)

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
        """The data peers that train; nothing is held for those that are gone (rule 5).

        Args:
            ended: whether there are data peers, and all have come to the end of the run.
            alive: those that are there and do not train.
        """
        self._present.look_at(origins, ended=ended)
        had = dict.fromkeys([*self._held, *self._kept])
        waiting = [trip.microbatch for trip in self._waiting.values()]
        away, since_s = {each.origin for each in (*had, *waiting)}, self._away_s
        away.difference_update(alive, self._present.present)
        self._away_s = {origin: since_s.get(origin, now_s) for origin in away}
        gone = {origin for origin in away if now_s - self._away_s[origin] >= GONE_S}
        commands = self._refuse(lambda trip: trip.microbatch.origin in gone)
        for microbatch in [each for each in had if each.origin in gone]:
            commands += self._forget(microbatch, now_s)
        return [*commands, *self._advance(now_s)]

    def lost(
        self, microbatch: Microbatch, sender: str, now_s: float, attempt: int = 0
    ) -> list[Command]:
        """A data peer has given up a microbatch of its own, or sends it another way."""
        if sender != microbatch.origin or attempt < self._attempt_of(microbatch):
            return []
        refused = self._refuse(
            lambda trip: trip.microbatch == microbatch and trip.attempt <= attempt
        )
        return [*refused, *self._let_go(microbatch, now_s)]

    def passed(self, microbatch: Microbatch, sender: str, attempt: int) -> list[Command]:
        """The one that we have sent a gradient has passed its own on; nobody needs ours again."""
        if attempt < self._attempt_of(microbatch):
            return []
        return self._kept.passed(microbatch, sender)

    def halted(
        self, microbatch: Microbatch, attempt: int, now_s: float
    ) -> tuple[Standing | None, list[Command]]:
        """Its data peer halts it (mending.py): where we stand; None when we cannot know."""
        iteration, held = self._present.number, self._held.get(microbatch)
        if iteration is not None and microbatch.iteration < iteration:
            return Standing.ADDED, []  # for all that can be known
        if held is not None and held.trip.leg is Leg.SCORE:
            return None, []  # no data peer halts what nobody mends
        too_many = microbatch not in self._halted and len(self._halted) >= MAX_REMEMBERED
        if too_many or attempt < self._halted.get(microbatch, 0):
            return None, []
        self._halted[microbatch] = attempt
        commands, standing = self._refuse(self._is_stale), self._standing(microbatch)
        if held is not None and held.standing is Standing.NOTHING:
            return standing, [*commands, *self._settle(microbatch, now_s)]
        if held is not None:
            held.sends_on = held.returns = False
        return standing, commands

    def resumed(self, trip: Trip, *, returns: bool) -> list[Command]:
        """It goes on like this; see `Resume`."""
        microbatch, held = trip.microbatch, self._held.get(trip.microbatch)
        commands: list[Command] = []
        is_score = held is not None and held.trip.leg is Leg.SCORE
        if is_score or trip.attempt != self._halted.get(microbatch):
            return []
        has_turned = held is not None and held.standing is Standing.KEEPS
        if held is not None and held.standing is not Standing.NOTHING:
            held.trip, held.returns = trip, returns
            if trip.until and not has_turned:
                held.sends_on = True
                commands.append(Resend(held.number))
        if returns and microbatch in self._kept:
            commands += self._kept.send(trip.back())
        elif returns and not has_turned:
            commands.append(_lost(microbatch, trip.attempt))
        return [*commands, *self._grant()]

    # --- boundaries -------------------------------------------------------------------------------
    def offered(self, ticket: int, trip: Trip) -> list[Command]:
        """A boundary is offered; it is answered now, or when its time has come."""
        refusal = self._refusal(trip)
        if trip.leg is not Leg.BACKWARD and trip.descents_ahead >= self._slots:
            refusal = RefusalReason.UNAVAILABLE
        if refusal is not None:
            self.counts[Counted.LATE] += trip.leg is Leg.BACKWARD
            return [AnswerOffer(ticket, refusal)]
        if trip.leg is Leg.BACKWARD and self._awaits(trip):
            return [AnswerOffer(ticket, self._welcome(trip))]
        if len(self._waiting) >= MAX_WAITING:
            self.counts[Counted.BUSY] += 1
            return [AnswerOffer(ticket, RefusalReason.BUSY)]
        self._waiting[ticket] = trip
        return self._grant()

    def withdrawn(self, ticket: int) -> list[Command]:
        """An offer that waits is no longer there; nothing happens where it was answered."""
        self._waiting.pop(ticket, None)
        return []

    def arrived(self, trip: Trip, slot: int, loss: float | None) -> list[Command]:
        """What was welcome lies in this inbound slot."""
        held = self._held.get(trip.microbatch)
        if held is not None and held.trip == trip and held.standing is Standing.NOTHING:
            held.standing = Standing.WAITS
            return [Filled(trip.leg, held.number, slot, loss), *self._grant()]
        if held is None or trip.leg is not Leg.BACKWARD or not self._awaits(trip):
            return [Freed(slot)]
        held.standing, held.returns = Standing.KEEPS, True
        return [Filled(trip.leg, held.number, slot, loss, adds=held.adds)]

    def broke_off(self, trip: Trip, now_s: float, *, refused: bool = False) -> list[Command]:
        """What was welcome has not come whole, or was refused (rule 7)."""
        self.counts[Counted.REFUSED] += refused
        told = _lost(trip.microbatch, trip.attempt, trip.sender, refused=True)
        commands: list[Command] = [told] if refused else []
        held = self._held.get(trip.microbatch)
        if held is not None and trip.leg is Leg.BACKWARD and held.welcomed == trip.attempt:
            held.welcomed = None
        if held is None or held.trip != trip or held.standing is not Standing.NOTHING:
            return commands  # it is a gradient, of an attempt before, or here after all
        return [*commands, *self._settle(trip.microbatch, now_s)]

    def sent(self, trip: Trip, now_s: float, *, taken: bool) -> list[Command]:
        """What was to be sent has been taken by the other, or has not."""
        microbatch, attempt = trip.microbatch, trip.attempt
        held, is_stale = self._held.get(microbatch), self._is_stale(trip)
        told = _lost(microbatch, attempt, trip.receiver)
        if trip.leg is Leg.BACKWARD and taken:
            # The one that we got ours from may forget its own.
            giver = replace(trip, place=trip.place + 2).receiver
            return [] if is_stale else [Tell((giver,), Passed(microbatch, attempt))]
        if trip.leg is Leg.SCORE and held is not None:
            self.counts[Counted.SCORED] += taken
            return [*([] if taken else [told]), *self._settle(microbatch, now_s)]
        # With its gradient here a forward was taken, whatever became of the receipt.
        has_turned = held is None or held.standing is Standing.KEEPS
        if taken or is_stale or (trip.leg is not Leg.BACKWARD and has_turned):
            return []
        if held is None or attempt or trip.leg is Leg.BACKWARD:
            return [told]
        self.counts[Counted.LOST] += 1
        return [Drop(held.number), told, *self._settle(microbatch, now_s)]

    # --- what the trainer says --------------------------------------------------------------------
    def produced(
        self, leg: Leg, number: int, slot: int, loss: float | None, now_s: float
    ) -> list[Command]:
        """What goes on lies in this outbound slot."""
        held = self.numbered(number)
        if held is None:
            return [Freed(slot)]
        if leg is Leg.BACKWARD:
            send = SendBoundary(held.trip.back(), slot, loss, keeps=True)
            return [*self._kept.keep(send), *([send] if held.returns else [])]
        if not held.sends_on:
            return [Freed(slot)]
        held.sends_on = False
        return [SendBoundary(replace(held.trip, leg=leg).onward(), slot, loss)]

    def returned(self, number: int, now_s: float) -> list[Command]:
        """The trainer has added a microbatch's gradient, if it was to."""
        held = self.numbered(number)
        if held is None:
            return []
        if held.adds:
            self._added.add(held.trip.microbatch)
            self.counts[Counted.DONE] += 1
            self.counts[Counted.REPLAYED] += held.stands_in
        return self._settle(held.trip.microbatch, now_s)

    def numbered(self, number: int) -> HeldMicrobatch | None:
        """What the trainer knows by this number, while it is held."""
        for held in self._held.values():
            if held.number == number:
                return held
        return None

    def stepped(self, now_s: float) -> list[Command]:
        """The trainer has stepped."""
        self._present.stepped(now_s)
        for each in (self._added, self._ended, self._halted):
            each.clear()
        closing = self._kept.drop_all()
        return [*closing, *self._refuse(self._present.is_after), *self._advance(now_s)]

    def restarted(self, slots: int) -> list[Command]:
        """The trainer is a new one, holds nothing, and has room for so many."""
        self._slots, had = slots, dict.fromkeys([*self._held, *self._kept])
        lost = [_lost(microbatch, self._attempt_of(microbatch)) for microbatch in had]
        self.counts[Counted.LOST] += sum(held.adds for held in self._held.values())
        self.counts[Counted.GONE] += len(self._added)
        self._held.clear()
        self._kept.clear(KEPT_PER_SLOT * slots)
        self._added.clear()
        self._present.is_finishing = False
        return [*lost, *self._grant()]

    def ticked(self, now_s: float) -> list[Command]:
        """Time has passed; a score that has been held for too long is forgotten."""
        commands: list[Command] = []
        for held in [held for held in self._held.values() if held.trip.leg is Leg.SCORE]:
            held.seen_s = now_s if held.seen_s is None else held.seen_s
            if now_s - held.seen_s >= self._patience_s:
                commands += self._forget(held.trip.microbatch, now_s)
        return [*commands, *self._advance(now_s)]

    # --- what is known of microbatches ------------------------------------------------------------
    def _attempt_of(self, microbatch: Microbatch) -> int:
        """The newest attempt that is known of a microbatch."""
        held = self._held.get(microbatch)
        brought = 0 if held is None else held.trip.attempt
        return max(brought, self._halted.get(microbatch, 0), self._kept.attempt_of(microbatch))

    def _is_stale(self, trip: Trip) -> bool:
        """Whether a trip is of an attempt before the newest."""
        return trip.attempt < self._halted.get(trip.microbatch, 0)

    def _awaits(self, trip: Trip) -> bool:
        """Whether this gradient is the one that is waited for."""
        held = self._held.get(trip.microbatch)
        if held is None or held.standing is not Standing.WAITS or held.trip.leg is Leg.SCORE:
            return False
        is_same = (held.trip.path, held.trip.attempt) == (trip.path, trip.attempt)
        return is_same and not self._is_stale(trip)

    def _standing(self, microbatch: Microbatch) -> Standing:
        held = self._held.get(microbatch)
        if microbatch in self._kept:
            return Standing.KEEPS
        if held is not None and held.standing is not Standing.NOTHING:
            return held.standing
        return Standing.ADDED if microbatch in self._added else Standing.NOTHING

    def _refusal(self, trip: Trip) -> RefusalReason | None:
        """Why a trip cannot be welcome in this iteration or later; None where it can."""
        microbatch, is_stale = trip.microbatch, self._is_stale(trip)
        if trip.leg is Leg.SCORE:
            # It goes through once, from end to end: nobody mends it.
            is_whole = not trip.attempt and trip.goes_on and not is_stale
            return None if is_whole else RefusalReason.UNAVAILABLE
        if trip.leg is Leg.BACKWARD:
            # In a later attempt the gradient may come before what it belongs to.
            may_come = (trip.attempt and not is_stale) or self._awaits(trip)
            return None if may_come else RefusalReason.UNAVAILABLE
        if self._present.is_after(trip):
            return RefusalReason.BEHIND
        if is_stale:
            return RefusalReason.UNAVAILABLE
        is_twice = microbatch in self._held or (microbatch in self._ended and not trip.attempt)
        return RefusalReason.TWICE if is_twice else None

    def _welcome(self, trip: Trip) -> RefusalReason | None:
        """Let a trip come whose time has come, unless it was let already.

        A credit holds memory until the boundary is there, so there is one for each move at most.
        """
        microbatch, held = trip.microbatch, self._held.get(trip.microbatch)
        if trip.leg is Leg.BACKWARD and held is not None and held.welcomed != trip.attempt:
            held.welcomed = trip.attempt
            return None
        if held is not None:
            return RefusalReason.TWICE
        adds = trip.leg is Leg.FORWARD and microbatch not in self._added
        stands_in = adds and trip.attempt > 0
        self._held[microbatch] = HeldMicrobatch(
            self._next_number, trip, adds, stands_in, trip.goes_on
        )
        self._next_number += 1
        return None

    def _has_slot(self, trip: Trip) -> bool:
        """Whether a microbatch with so many descents ahead of it may take a slot (rule 6)."""
        held = [each.trip.descents_ahead for each in self._held.values()]
        return all(
            sum(each >= least for each in held) < self._slots - least
            for least in range(trip.descents_ahead + 1)
        )

    # --- decisions --------------------------------------------------------------------------------
    def _refuse(self, which: Callable[[Trip], bool]) -> list[Command]:
        """Refuse offers that wait."""
        refused = {ticket: trip for ticket, trip in self._waiting.items() if which(trip)}
        for ticket in refused:
            del self._waiting[ticket]
        unavailable, behind = RefusalReason.UNAVAILABLE, RefusalReason.BEHIND
        return [
            AnswerOffer(ticket, behind if self._present.is_after(trip) else unavailable)
            for ticket, trip in refused.items()
        ]

    def _forget(self, microbatch: Microbatch, now_s: float) -> list[Command]:
        """Let a microbatch go, and say so."""
        told = _lost(microbatch, self._attempt_of(microbatch))
        return [told, *self._let_go(microbatch, now_s)]

    def _let_go(self, microbatch: Microbatch, now_s: float) -> list[Command]:
        """Neither hold nor keep anything of a microbatch."""
        commands, held = self._kept.drop(microbatch), self._held.get(microbatch)
        if held is None:
            return commands
        self.counts[Counted.LOST] += held.adds
        return [*commands, Drop(held.number), *self._settle(microbatch, now_s)]

    def _settle(self, microbatch: Microbatch, now_s: float) -> list[Command]:
        """Nothing of this microbatch is held any more."""
        if self._held.pop(microbatch).trip.leg is Leg.FORWARD:
            self._ended.add(microbatch)
        return self._advance(now_s)

    def _advance(self, now_s: float) -> list[Command]:
        """Give credit; end the iteration if it is over, and forget what is held of it still."""
        commands = self._grant()
        if not self._present.ends(now_s):
            return commands
        for microbatch in [m for m, h in self._held.items() if h.trip.leg is Leg.FORWARD]:
            commands += self._forget(microbatch, now_s)
        return [*commands, Finish()]

    def _grant(self) -> list[Command]:
        """Credit for the offers whose time has come, the oldest first, mended ones before."""
        granted: list[Command] = []
        for ticket, trip in sorted(self._waiting.items(), key=lambda each: not each[1].attempt):
            if trip.leg is Leg.BACKWARD:
                is_due = self._awaits(trip)
            else:
                is_due = self._present.is_of(trip) and self._has_slot(trip)
            if is_due:
                del self._waiting[ticket]
                granted.append(AnswerOffer(ticket, self._welcome(trip)))
        return granted


def _lost(
    microbatch: Microbatch, attempt: int, failed: str | None = None, *, refused: bool = False
) -> Tell:
    """What its data peer is told of a microbatch."""
    return Tell((microbatch.origin,), Lost(microbatch, attempt, failed, refused))


def _check(microbatch: Microbatch, sender: str, leg: Leg = Leg.FORWARD) -> None:
    if microbatch.origin != sender or leg is not Leg.FORWARD:
        raise RemoteProtocolError("a data peer leads the forwards of its own microbatches alone")
