"""The core of a relay: what it takes, what it works on, and when it steps. No clock, no I/O.

Theory. A relay holds one stage and works for data peers. Its trainer keeps the graph of every
forward until the gradient comes back, so a relay takes no more microbatches than it has slots for,
and its weights must be the same at both moments. So training goes in *iterations*, which the data
peers number and the relays keep apart:

  1. A data peer announces an iteration to every relay when nothing of the ones before is under way
     for it; what is announced stands (iterations.py). A relay answers where the others are
     (`newest_for`), and one that is behind goes on there, by a bounded leap: nobody hands out
     numbers.
  2. An offer of a forward waits until its iteration is the present one and a slot is free; the
     answer *is* the credit. A forward of a past iteration is refused (`behind`), a full queue is
     `busy`, and costs nothing. The gradient of what is held is welcome at any time, once: a
     repeated offer is refused (`twice`).
  3. The iteration is over when every data peer that trains has announced a later one, or, at the
     end of the run, when none is left that trains. Then the relay steps; it is in the next
     iteration when the trainer has stepped. Until then a microbatch that was lost elsewhere may
     still come by.
  4. A microbatch that is lost anywhere sets out once more in another *attempt* (data_peer.py). Its
     data peer has us forget the one before; until we have, the new one waits. A relay that has
     added its gradient computes it without adding then.
  5. After `patience_s`, or sooner where the other data peers have finished (iterations.py), a relay
     steps with the gradients that it has, forgets the microbatches that it still holds, and tells
     their data peers. A gradient that arrives later is refused and counted as late.
     A data peer that has been away for GONE_S is gone (a link that breaks may be back in a moment).
     Its microbatches are forgotten and its offers refused, because others need the slots.
     A score belongs to no iteration. It goes through once: no gradient is taken for it, and it is
     forgotten after `patience_s`.
  6. A microbatch holds a slot at every relay that it has passed while it waits for the next one.
     Stages rise along a path (CC3, protocol/pipeline/problem.py); an offer of another is refused.
  7. A boundary that cannot be right (sizes.py) is refused. Its data peer is told at once who sent
     it, and has the microbatch go another way.

Invariants: a microbatch's gradient counts once at most (it is held once, its name is refused after
it is done, and in a later attempt it is computed without being added); at most `slots` are held; an
iteration that all data peers announced ends, because its forwards need only the same iteration
elsewhere, no later one takes their slots, and slots are not waited for in a circle. The last
follows from rule 6: who holds a slot of one stage and waits for another waits for a higher stage.
So among all that wait, those for the highest stage wait for slots whose holders wait for none.
(Dally and Seitz keep packets from blocking each other in a circle by such an order of channels:
IEEE Trans. Computers C-36(5), 1987.) What is held of an attempt before waits for no slot: it is
forgotten.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from protocol.limits import MAX_REMEMBERED
from protocol.outcomes import RefusalReason
from protocol.wire.stage_messages import (
    Announcement,
    Direction,
    Hop,
    Lost,
    Microbatch,
    Noted,
    Notice,
)

from .core import AnswerOffer, Command, MicrobatchEvent, SendBoundary, SendNotice, StageCore
from .iterations import CurrentIteration
from .trainer_messages import Drop, Filled, Finish, Freed

GONE_S: Final = 10.0
"""A data peer that loses a link to a relay sends what it had there another way at once."""
MAX_WAITING: Final = 256
"""Offers without an answer."""


@dataclass(slots=True)
class HeldMicrobatch:
    """A microbatch with a slot.

    Attributes:
        hop: the forward that brought it.
        adds: whether its gradient is to be added; not where it has been, nor that of a score.
        is_here: whether its activations are.
        is_welcome: whether its gradient is, and has not come.
        gradient_here: whether its gradient has come.
        seen_s: when it was seen to be held first.
    """

    number: int
    hop: Hop
    adds: bool
    is_here: bool = False
    is_welcome: bool = False
    gradient_here: bool = False
    seen_s: float | None = None

    def awaits(self, hop: Hop) -> bool:
        waits = self.is_here and not self.gradient_here and self.hop.direction is Direction.FORWARD
        return waits and replace(hop, direction=Direction.FORWARD) == self.hop


class RelayCore(StageCore):
    """Takes microbatches, has them computed, passes them on, and steps.

    Args:
        slots: microbatches held at once, until a trainer says otherwise.
        patience_s: longest time for an iteration.
    """

    def __init__(self, slots: int, patience_s: float) -> None:
        super().__init__()
        self._slots, self._patience_s = slots, patience_s
        self._current = CurrentIteration(patience_s)
        self._waiting: dict[int, Hop] = {}
        self._held: dict[Microbatch, HeldMicrobatch] = {}
        self._added: set[Microbatch] = set()  # in this iteration
        self._ended: set[tuple[Microbatch, int]] = set()  # these attempts do not come again
        self._newest: dict[Microbatch, int] = {}  # attempt of each that was lost
        self._absent_since_s: dict[str, float] = {}  # by data peer
        self._next_number = 0
        self._run_end_seen_s = math.inf

    # --- what peers say ---------------------------------------------------------------------------
    def on_message(self, sender: str, message: Notice, now_s: float) -> tuple[Noted, list[Command]]:
        """A data peer says something. Returns the answer, too."""
        match message:
            case Announcement(iteration):
                commands = self.announced(sender, iteration, now_s)
            case Lost(microbatch, attempt):
                commands = self.given_up(microbatch, sender, attempt)
        return Noted(self.newest_for(sender)), commands

    def announced(self, origin: str, iteration: int, now_s: float) -> list[Command]:
        self._current.announced(origin, iteration, now_s)
        return self._advance(now_s)

    @property
    def iteration(self) -> int | None:
        return self._current.number

    def newest_for(self, origin: str) -> int:
        return self._current.newest_for(origin)

    def peers_changed(
        self, origins: Iterable[str], now_s: float, *, ended: bool, alive: Iterable[str] = ()
    ) -> list[Command]:
        """Take over which data peers train; forget what is held for absent ones (rule 5).

        Args:
            ended: whether there are data peers, and all have come to the end of the run.
            alive: those that are there and do not train.
        """
        self._current.peers_changed(origins, ended=ended)
        known = [*self._held, *(hop.microbatch for hop in self._waiting.values())]
        absent, since_s = {each.origin for each in known}, self._absent_since_s
        absent.difference_update(alive, self._current.present)
        self._absent_since_s = {origin: since_s.get(origin, now_s) for origin in absent}
        gone = {origin for origin in absent if now_s - self._absent_since_s[origin] >= GONE_S}
        commands = self._refuse(lambda hop: hop.microbatch.origin in gone)
        for microbatch in [each for each in self._held if each.origin in gone]:
            commands += self._forget(microbatch)
        return [*commands, *self._advance(now_s)]

    def may_end(self, now_s: float, *, ended: bool, needed: bool) -> bool:
        """Whether a relay may go past the run's last step.

        Data peers do not end in one iteration, and a relay that has ended no longer steps: the
        others would wait for it. One that never ends is waited for as long as an iteration is.

        Args:
            ended: whether the relay comes to the run's last step.
            needed: whether a data peer still trains.
        """
        if not (ended and needed):
            self._run_end_seen_s = math.inf  # an amended run ends a second time
            return True
        self._run_end_seen_s = min(self._run_end_seen_s, now_s)
        return now_s - self._run_end_seen_s > self._patience_s

    def given_up(self, microbatch: Microbatch, sender: str, attempt: int = 0) -> list[Command]:
        """A data peer has given up an attempt of a microbatch of its own (rule 4)."""
        newest, held = self._newest, self._held.get(microbatch)
        if sender != microbatch.origin or attempt < newest.get(microbatch, 0):
            return []
        if microbatch in newest or len(newest) < MAX_REMEMBERED:
            newest[microbatch] = attempt + 1
        is_old = held is not None and held.hop.attempt <= attempt
        refused = self._refuse(lambda t: t.microbatch == microbatch and t.attempt <= attempt)
        # A gradient that is here is being added; its microbatch settles then.
        lets_go = held is not None and is_old and not held.gradient_here
        return [*refused, *(self._let_go(microbatch) if lets_go else [])]

    # --- boundaries -------------------------------------------------------------------------------
    def offered(self, ticket: int, hop: Hop) -> list[Command]:
        held, refusal = self._held.get(hop.microbatch), self._refusal(hop)
        if hop.direction is Direction.BACKWARD:
            self.counts[MicrobatchEvent.LATE] += refusal is RefusalReason.UNAVAILABLE
            if held is not None and refusal is None:
                held.is_welcome = True
            return [AnswerOffer(ticket, refusal)]
        if refusal is None and len(self._waiting) >= MAX_WAITING:
            self.counts[MicrobatchEvent.BUSY] += 1
            refusal = RefusalReason.BUSY
        if refusal is not None:
            return [AnswerOffer(ticket, refusal)]
        self._waiting[ticket] = hop
        return self._grant()

    def withdrawn(self, ticket: int) -> list[Command]:
        self._waiting.pop(ticket, None)
        return []

    def arrived(self, hop: Hop, slot: int, loss: float | None) -> list[Command]:
        held = self._held.get(hop.microbatch)
        if held is not None and held.hop == hop and not held.is_here:
            held.is_here = True
        elif held is not None and hop.direction is Direction.BACKWARD and held.awaits(hop):
            held.gradient_here = True
        else:
            return [Freed(slot)]
        return [Filled(hop.direction, held.number, slot, loss, adds=held.adds)]

    def broke_off(self, hop: Hop, now_s: float, *, refused: bool = False) -> list[Command]:
        self.counts[MicrobatchEvent.REFUSED] += refused
        told = _lost(hop.microbatch, hop.attempt, hop.sender, refused=True)
        commands: list[Command] = [told] if refused else []
        held = self._held.get(hop.microbatch)
        if held is not None and hop.direction is Direction.BACKWARD and held.awaits(hop):
            held.is_welcome = False
        if held is not None and held.hop == hop and not held.is_here:
            commands += self._settle(hop.microbatch)
        return commands

    def sent(self, hop: Hop, now_s: float, *, taken: bool) -> list[Command]:
        microbatch, attempt = hop.microbatch, hop.attempt
        held, is_stale = self._held.get(microbatch), self._is_stale(hop)
        told = _lost(microbatch, attempt, hop.receiver)
        if hop.direction is Direction.SCORE and held is not None:
            self.counts[MicrobatchEvent.SCORED] += taken
            return [*([] if taken else [told]), *self._settle(microbatch)]
        if taken or is_stale:
            return []
        if hop.direction is Direction.BACKWARD:
            return [told]
        # With its gradient here a forward was taken, whatever became of the receipt.
        if held is None or held.gradient_here or held.hop.attempt != attempt:
            return []
        return [told, *self._let_go(microbatch)]

    # --- what the trainer says --------------------------------------------------------------------
    def produced(
        self, direction: Direction, number: int, slot: int, loss: float | None, now_s: float
    ) -> list[Command]:
        held = self.numbered(number)
        if held is None or self._is_stale(held.hop):
            return [Freed(slot)]
        onward = held.hop.back() if direction is Direction.BACKWARD else held.hop.onward()
        return [SendBoundary(onward, slot, loss)]

    def returned(self, number: int, now_s: float) -> list[Command]:
        held = self.numbered(number)
        if held is None:
            return []
        if held.adds:
            self._added.add(held.hop.microbatch)
            self.counts[MicrobatchEvent.DONE] += 1
            self.counts[MicrobatchEvent.REPLAYED] += held.hop.attempt > 0
        return self._settle(held.hop.microbatch)

    def numbered(self, number: int) -> HeldMicrobatch | None:
        for held in self._held.values():
            if held.number == number:
                return held
        return None

    def stepped(self, now_s: float) -> list[Command]:
        self._current.stepped(now_s)
        for each in (self._added, self._ended, self._newest):
            each.clear()
        return [*self._refuse(self._current.is_after), *self._advance(now_s)]

    def restarted(self, slots: int) -> list[Command]:
        self._slots = slots
        lost = [_lost(each.hop.microbatch, each.hop.attempt) for each in self._held.values()]
        self.counts[MicrobatchEvent.LOST] += sum(held.adds for held in self._held.values())
        self.counts[MicrobatchEvent.GONE] += len(self._added)
        self._held.clear()
        self._added.clear()
        self._current.is_finishing = False
        return [*lost, *self._grant()]

    def ticked(self, now_s: float) -> list[Command]:
        """Time has passed; a score that has been held for too long is forgotten."""
        commands: list[Command] = []
        for held in [held for held in self._held.values() if held.hop.direction is Direction.SCORE]:
            held.seen_s = now_s if held.seen_s is None else held.seen_s
            if now_s - held.seen_s >= self._patience_s:
                commands += self._forget(held.hop.microbatch)
        return [*commands, *self._advance(now_s)]

    # --- what is known of microbatches ------------------------------------------------------------
    def _is_stale(self, hop: Hop) -> bool:
        return hop.attempt < self._newest.get(hop.microbatch, 0)

    def _refusal(self, hop: Hop) -> RefusalReason | None:
        """Why a hop cannot be welcome in this iteration or later; None where it can."""
        microbatch, held = hop.microbatch, self._held.get(hop.microbatch)
        if hop.direction is Direction.BACKWARD:
            if held is None or self._is_stale(hop) or not held.awaits(hop):
                return RefusalReason.UNAVAILABLE
            # A credit holds memory until the boundary is there.
            return RefusalReason.TWICE if held.is_welcome else None
        if hop.direction is Direction.FORWARD and self._current.is_after(hop):
            return RefusalReason.BEHIND
        # A score goes through once, and nobody sends it again.
        if self._is_stale(hop) or (hop.direction is Direction.SCORE and hop.attempt):
            return RefusalReason.UNAVAILABLE
        is_here = held is not None and held.hop.attempt >= hop.attempt
        is_twice = is_here or (microbatch, hop.attempt) in self._ended
        return RefusalReason.TWICE if is_twice and hop.direction is Direction.FORWARD else None

    # --- decisions --------------------------------------------------------------------------------
    def _refuse(self, which: Callable[[Hop], bool]) -> list[Command]:
        refused = {ticket: hop for ticket, hop in self._waiting.items() if which(hop)}
        for ticket in refused:
            del self._waiting[ticket]
        unavailable, behind = RefusalReason.UNAVAILABLE, RefusalReason.BEHIND
        return [
            AnswerOffer(ticket, behind if self._current.is_after(hop) else unavailable)
            for ticket, hop in refused.items()
        ]

    def _forget(self, microbatch: Microbatch) -> list[Command]:
        told = _lost(microbatch, self._held[microbatch].hop.attempt)
        return [told, *self._let_go(microbatch)]

    def _let_go(self, microbatch: Microbatch) -> list[Command]:
        held = self._held[microbatch]
        self.counts[MicrobatchEvent.LOST] += held.adds
        return [Drop(held.number), *self._settle(microbatch)]

    def _settle(self, microbatch: Microbatch) -> list[Command]:
        hop = self._held.pop(microbatch).hop
        if hop.direction is Direction.FORWARD:
            self._ended.add((microbatch, hop.attempt))
        return self._grant()

    def _advance(self, now_s: float) -> list[Command]:
        """Give credit; end the iteration if it is over, and forget what is held of it still."""
        commands = self._grant()
        if not self._current.ends(now_s):
            return commands
        held = [each.hop for each in self._held.values()]
        for hop in [each for each in held if each.direction is Direction.FORWARD]:
            commands += self._forget(hop.microbatch)
        return [*commands, Finish()]

    def _grant(self) -> list[Command]:
        """Credit for the offers whose time has come, the oldest first, later attempts before."""
        granted: list[Command] = []
        for ticket, hop in sorted(self._waiting.items(), key=lambda each: not each[1].attempt):
            refusal = self._refusal(hop)
            is_due = self._current.is_of(hop) and hop.microbatch not in self._held
            if refusal is None and is_due and len(self._held) < self._slots:
                adds = hop.direction is Direction.FORWARD and hop.microbatch not in self._added
                held = HeldMicrobatch(self._next_number, hop, adds)
                self._held[hop.microbatch], self._next_number = held, self._next_number + 1
            elif refusal is not RefusalReason.TWICE:
                continue
            del self._waiting[ticket]
            granted.append(AnswerOffer(ticket, refusal))
        return granted


def _lost(
    microbatch: Microbatch, attempt: int, failed: str | None = None, *, refused: bool = False
) -> SendNotice:
    return SendNotice((microbatch.origin,), Lost(microbatch, attempt, failed, refused))
