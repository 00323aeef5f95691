"""What a relay knows of the microbatches of its iteration: held, kept, added, ended, mended."""

from dataclasses import dataclass

from protocol.outcomes import RefusalReason
from protocol.wire.stage_messages import Leg, Microbatch, Standing, Trip

from .core import Command
from .mending import KeptGradients


@dataclass(slots=True)
class HeldMicrobatch:
    """A microbatch with a slot.

    Attributes:
        trip: the forward that brought it, or how it goes on since.
        adds: whether its gradient is to be added; not where it has been, nor that of a score.
        stands_in: whether it came in place of a relay that is gone.
        computes: whether the trainer has its activations.
        welcomed: the attempt in which its gradient is welcome, and has not come; None before.
        turned: whether the trainer has its gradient.
        sends_on: whether what the forward makes is to be sent.
        returns: whether what the backward makes is to be sent.
        seen_s: when it was seen to be held first; None before.
    """

    number: int
    trip: Trip
    adds: bool = True
    stands_in: bool = False
    computes: bool = False
    welcomed: int | None = None
    turned: bool = False
    sends_on: bool = True
    returns: bool = True
    seen_s: float | None = None


class Ledger:
    """See the top of the file.

    Args:
        kept: gradients kept at once.

    Attributes:
        held: those with a slot.
        kept: gradients that have been sent, and stay until they are passed on.
        added: those whose gradient has been added in this iteration.
        ended: those that do not come again in their first attempt.
        attempts: the newest attempt of those that have been halted.
    """

    def __init__(self, kept: int) -> None:
        self.held: dict[Microbatch, HeldMicrobatch] = {}
        self.kept = KeptGradients(kept)
        self.added: set[Microbatch] = set()
        self.ended: set[Microbatch] = set()
        self.attempts: dict[Microbatch, int] = {}
        self._next_number = 0

    def numbered(self, number: int) -> HeldMicrobatch | None:
        """What the trainer knows by this number."""
        for held in self.held.values():
            if held.number == number:
                return held
        return None

    def attempt_of(self, microbatch: Microbatch) -> int:
        """The newest attempt that is known of a microbatch."""
        held = self.held.get(microbatch)
        brought = 0 if held is None else held.trip.attempt
        halted = self.attempts.get(microbatch, 0)
        return max(brought, halted, self.kept.attempt_of(microbatch))

    def is_stale(self, trip: Trip) -> bool:
        """Whether a trip is of an attempt before the newest."""
        return trip.attempt < self.attempts.get(trip.microbatch, 0)

    def awaits(self, trip: Trip) -> bool:
        """Whether this gradient is the one that is waited for."""
        held = self.held.get(trip.microbatch)
        if held is None or held.turned or not held.computes or self.is_stale(trip):
            return False
        if held.trip.leg is not Leg.FORWARD:
            return False
        return (held.trip.path, held.trip.attempt) == (trip.path, trip.attempt)

    def refusal(self, trip: Trip, iteration: int | None) -> RefusalReason | None:
        """Why a trip cannot be welcome in this iteration or later; None where it can."""
        if trip.leg is Leg.SCORE:
            # It goes through once, from end to end: nobody mends it.
            is_whole = not trip.attempt and trip.goes_on and not self.is_stale(trip)
            return None if is_whole else RefusalReason.UNAVAILABLE
        if trip.leg is Leg.BACKWARD:
            # In a later attempt the gradient may come before what it belongs to.
            may_come = trip.attempt and not self.is_stale(trip)
            return None if may_come or self.awaits(trip) else RefusalReason.UNAVAILABLE
        if iteration is not None and trip.microbatch.iteration < iteration:
            return RefusalReason.BEHIND
        if self.is_stale(trip):
            return RefusalReason.UNAVAILABLE
        if trip.microbatch in self.held or (trip.microbatch in self.ended and not trip.attempt):
            return RefusalReason.TWICE
        return None

    def welcome(self, trip: Trip) -> RefusalReason | None:
        """Let a trip come whose time has come, unless it was let already.

        A credit holds memory until the boundary is there, so there is one for each move at most.
        """
        microbatch = trip.microbatch
        held = self.held.get(microbatch)
        if trip.leg is Leg.BACKWARD and held is not None and held.welcomed != trip.attempt:
            held.welcomed = trip.attempt
            return None
        if held is not None:
            return RefusalReason.TWICE
        adds = trip.leg is Leg.FORWARD and microbatch not in self.added
        self.held[microbatch] = HeldMicrobatch(
            self._next_number,
            trip,
            adds=adds,
            stands_in=adds and trip.attempt > 0,
            sends_on=trip.goes_on,
        )
        self._next_number += 1
        return None

    def has_slot(self, trip: Trip, slots: int) -> bool:
        """Whether a microbatch with so many descents ahead of it may take a slot (rule 6)."""
        ahead = trip.descents_ahead
        held = [each.trip.descents_ahead for each in self.held.values()]
        return all(
            sum(each >= least for each in held) < slots - least for least in range(ahead + 1)
        )

    def is_score(self, microbatch: Microbatch) -> bool:
        """Whether it is held, and no gradient follows."""
        held = self.held.get(microbatch)
        return held is not None and held.trip.leg is Leg.SCORE

    def scores_held_for(self, longer_than_s: float, now_s: float) -> list[Microbatch]:
        """The scores that were held at a look so long ago, and are still."""
        old = []
        for microbatch, held in self.held.items():
            if held.trip.leg is Leg.SCORE:
                held.seen_s = now_s if held.seen_s is None else held.seen_s
                if now_s - held.seen_s >= longer_than_s:
                    old.append(microbatch)
        return old

    def standing(self, microbatch: Microbatch) -> Standing:
        """Where we stand with it."""
        held = self.held.get(microbatch)
        if microbatch in self.kept or (held is not None and held.turned):
            return Standing.KEEPS
        if held is not None and held.computes:
            return Standing.WAITS
        return Standing.ADDED if microbatch in self.added else Standing.NOTHING

    def close(self) -> list[Command]:
        """The iteration is over."""
        self.added.clear()
        self.ended.clear()
        self.attempts.clear()
        return self.kept.drop_all()
