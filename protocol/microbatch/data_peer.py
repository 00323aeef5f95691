"""The core of a data peer: which way its microbatches go, and what has become of them.

Rules
  1. An iteration's number is the next one, or where the middle of a stage is, by what its relays
     have told: that of the furthest stage, for each is needed. So data peers that are behind catch
     up, by a bounded leap (iterations.py), and one relay that lies among others moves nobody. A
     data peer announces an iteration when nothing of the one before is under way any more
     (relay.py).
  2. A router (relays.py) chooses paths when an iteration sets out, over the relays that are there
     then. A stage that nobody holds any more is left out by all of them, if paths may be so; where
     they may not, and before anything has been trained, the iteration waits for somebody to come,
     and its microbatches stay where they are. What is left out gets no gradient (`without`).
  3. A microbatch is lost when a trip of it fails, when a relay says so, and when a relay of its
     path is no longer there. On its way to the loss it has left no gradient anywhere: it sets out
     again, under a new name, past the relays that have failed in this iteration, ATTEMPTS times at
     most. The relays of its old path are told to forget it. At once it sets out again but once;
     then, and where no path is left, it waits for the next tick: by then it is known who is gone.
  4. On its way back some stages have added its gradient. It keeps its name and goes on over
     stand-ins, MENDS times at most (mending.py). A relay that does not answer, and is not gone
     either, may have added: it is asked again.
  5. A microbatch for which there is no other way is given up, and so is one that is not back after
     `patience_s`, or waits in vain for a stand-in while others can leave out its stage.
  6. What a relay had added goes with it if it dies before the step; it is counted (`gone`).
  7. The next microbatches, as many as the trainer keeps under way, are named and offered to their
     first relays before the trainer has produced them: when an iteration sets out, and when one is
     about to come home.
  8. Of what comes to us each move is let come once in each attempt, again only if it breaks off.
  9. What comes and cannot be right (sizes.py), here or at a relay, makes its sender one that has
     failed (rules 3 and 4). Of a gradient nothing that this sender keeps is asked for any more.

Invariant: the trainer is told exactly one end of every microbatch: its gradient, or that it is
dropped.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

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
    Path,
    Resume,
    Standing,
    Trip,
)

from .core import AnswerOffer, Command, Counted, SendBoundary, StageCore, Tell
from .iterations import Announced, next_iteration
from .mending import KEPT, KEPT_PER_SLOT, MENDS, Away, Mender
from .relays import Relays, RelaysThere, Router
from .trainer_messages import Drop, Filled, Freed, Resend

ATTEMPTS: Final = 8
"""Times that a microbatch sets out, at most."""


@dataclass(slots=True)
class OwnIteration:
    """The iteration that the trainer has begun.

    Attributes:
        left: microbatches that have not come to an end.
        paths: of those that have no name yet; None until there are relays.
        named: those that have one, and have not set out (rule 7).
        seen: numbers of those that the trainer has produced.
        ready: (number, slot) of those that could set out, and wait for a path.
        again: those that set out again: when the trainer has produced them once more, or, where
            that was in vain, at a tick.
        welcomed: the moves to us that were let come: (microbatch, leg, attempt).
    """

    left: int = 0
    paths: deque[Path] | None = None
    named: dict[Microbatch, Path] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    ready: list[tuple[int, int]] = field(default_factory=list)
    again: dict[int, Away] = field(default_factory=dict)
    welcomed: set[tuple[Microbatch, Leg, int]] = field(default_factory=set)


class DataPeerCore(StageCore):
    """See the top of the file. Every event returns what is to be done.

    Args:
        peer_id: ours.
        router: chooses paths.
        patience_s: longest time from a microbatch's beginning to its end.
        kept: gradients of the loss kept at once, after they have been sent.
        in_flight: microbatches that the trainer keeps under way, at most; rule 7 is about so many.

    Attributes:
        iteration: the present one; 0 before the first.
        announced: the newest that relays were told of; 0 before the first.
        left_out: the stages that nobody held when the present iteration set out.
    """

    def __init__(
        self,
        peer_id: str,
        router: Router,
        patience_s: float,
        *,
        kept: int = KEPT,
        in_flight: int = 0,
    ) -> None:
        super().__init__()
        self._peer_id = peer_id
        self._router = router
        self._patience_s = patience_s
        self._in_flight = in_flight
        self._away: dict[int, Away] = {}
        self._present = OwnIteration()
        self._heard = Announced()
        self.announced = 0
        self._next_index = 0
        self._relays = RelaysThere()
        self.iteration = 0
        self.left_out: tuple[int, ...] = ()
        self._mender = Mender(self._relays, kept, self.counts)

    # --- what peers say ---------------------------------------------------------------------------
    def present(self, relays: Relays, now_s: float, *, trained: bool) -> list[Command]:
        """The peers of each stage from the second on, sorted; whether the run has been trained."""
        come, gone = self._relays.update(relays, now_s)
        self._relays.trained = trained
        self._heard.look(self._relays.all)
        commands: list[Command] = []
        if come and self.announced:
            commands.append(Tell(tuple(sorted(come)), Announcement(self.announced)))
        self.counts[Counted.GONE] += sum(map(self._relays.gone_with, gone))
        for away in list(self._away.values()):
            if away.mending is not None:
                commands += self._mender.look_around(away)
            elif not self._relays.all.union(away.gone).issuperset(away.path.relays):
                commands += self._lose(away)
        return [*commands, *self._set_out(now_s)]

    def told(
        self, sender: str, message: Notice, now_s: float
    ) -> tuple[Noted | Halted | Refusal, list[Command]]:
        """A relay says something. Returns the answer, too."""
        match message:
            case Lost():
                commands = self.lost(message, sender)
            case Passed(microbatch, attempt):
                commands = self.passed(microbatch, sender, attempt)
            case _:  # said to the relay that we were before we went over to this stage
                sentence = f"a {type(message).__name__} is not for this stage"
                return Refusal(RefusalReason.OTHER_GROUP, sentence), []
        return Noted(self.iteration), commands

    def answered(
        self, peer_id: str, message: Notice, answer: Noted | Halted | None
    ) -> list[Command]:
        """A relay was told something, and has answered; None when it has not."""
        match message, answer:
            case Announcement(), Noted(iteration):
                self._heard.add(peer_id, iteration)
            case Halt(microbatch, attempt), _:
                standing = answer.standing if isinstance(answer, Halted) else None
                return self.found(microbatch, attempt, peer_id, standing)
            case Resume(trip), None:
                return self.lost(Lost(trip.microbatch, trip.attempt), peer_id)
        return []

    def lost(self, told: Lost, relay: str) -> list[Command]:
        """A relay has forgotten it, or cannot send it on; only one of its path may say so."""
        lost, named = told.microbatch, self._present.named
        if lost in named and relay in named[lost].relays:
            other = self._name()  # which nobody has forgotten
            self._present.named = {other if m == lost else m: path for m, path in named.items()}
            return [Tell(named[lost].relays, Lost(lost))]
        away = self._find(told.microbatch)
        if away is None or relay not in away.path.relays or told.attempt != away.attempt:
            return []
        self._mender.blamed(away, relay, told)
        return self._lose(away)

    def found(
        self, microbatch: Microbatch, attempt: int, relay: str, standing: Standing | None
    ) -> list[Command]:
        """A relay that was halted has said where it stands; None when it has not answered."""
        away = self._find(microbatch)
        return [] if away is None else self._mender.found(away, attempt, relay, standing)

    def passed(self, microbatch: Microbatch, sender: str, attempt: int) -> list[Command]:
        """The last relay has passed the gradient on; nobody needs that of the loss again."""
        away = self._find(microbatch)
        if away is not None and attempt < away.attempt:
            return []
        return self._mender.kept.passed(microbatch, sender)

    def offered(self, ticket: int, trip: Trip) -> list[Command]:
        """A boundary is offered."""
        away = self._find(trip.microbatch)
        path = self._present.named.get(trip.microbatch) if away is None else away.path
        is_here = trip.place in (0, len(trip.path.relays) + 1)
        if path != trip.path or not is_here or (away and not away.is_due(trip)):
            return [AnswerOffer(ticket, RefusalReason.UNAVAILABLE)]
        move, welcomed = (trip.microbatch, trip.leg, trip.attempt), self._present.welcomed
        if move in welcomed:
            return [AnswerOffer(ticket, RefusalReason.TWICE)]
        welcomed.add(move)
        if away is None:
            return [AnswerOffer(ticket)]  # offered ahead all along its path
        away.nearly_home = trip.place == 0
        return [AnswerOffer(ticket), *self._offer_ahead()]

    def withdrawn(self, ticket: int) -> list[Command]:
        """Nothing waits here."""
        return []

    def arrived(self, trip: Trip, slot: int, loss: float | None) -> list[Command]:
        """What was welcome lies in this inbound slot."""
        away = self._find(trip.microbatch)
        if away is None or not away.is_due(trip):
            return [Freed(slot)]
        if trip.leg is Leg.SCORE:
            del self._away[away.number]
        away.turned = True
        if trip.leg is Leg.BACKWARD:
            away.home = True
            living = [relay for relay in away.path.relays if relay not in away.gone]
            self._relays.added(living, away.microbatch.iteration)
        else:
            away.finishing = away.returns = True
        return [Filled(trip.leg, away.number, slot, loss)]

    def broke_off(self, trip: Trip, now_s: float, *, refused: bool = False) -> list[Command]:
        """What was welcome has not come whole, or was refused (rule 9)."""
        self._present.welcomed.discard((trip.microbatch, trip.leg, trip.attempt))
        away = self._find(trip.microbatch)
        if refused:
            self.counts[Counted.REFUSED] += 1
            self._relays.failed.add(trip.sender)
            if away is not None and trip.leg is Leg.BACKWARD:
                away.distrusted.add(trip.sender)
        return [] if away is None or not away.is_due(trip) else self._lose(away)

    def sent(self, trip: Trip, now_s: float, *, taken: bool) -> list[Command]:
        """What was to be sent has been taken by the other, or has not."""
        away = self._find(trip.microbatch)
        if taken or away is None or trip.attempt != away.attempt:
            return []
        self._relays.failed.add(trip.receiver)
        return self._lose(away)

    # --- what the trainer says --------------------------------------------------------------------
    def begun(self, microbatches: int, now_s: float) -> list[Command]:
        """The trainer begins an iteration."""
        self._present = OwnIteration(microbatches)
        self._relays.failed.clear()
        self._relays.forget_before(self.iteration)
        return self._set_out(now_s)

    def produced(
        self, leg: Leg, number: int, slot: int, loss: float | None, now_s: float
    ) -> list[Command]:
        """The trainer has made what leaves."""
        present, away = self._present, self._away.get(number)
        if leg is Leg.SCORE:
            return self._score(number, slot, now_s)
        if leg is Leg.FORWARD and number in present.again:  # rule 3
            before = present.again[number]
            before.slot = slot
            return [] if before.setouts > 1 else self._other_way(before, slot)
        if leg is Leg.FORWARD and number not in present.seen:
            present.seen.add(number)
            present.ready.append((number, slot))
            return self._leave(now_s)
        if away is None or (leg is Leg.FORWARD and (away.mending or not away.until)):
            return [Freed(slot)]
        if leg is Leg.FORWARD:  # it goes on (mending.py)
            until, away.until = away.until, 0
            return [SendBoundary(away.trip(1, until=until), slot, None)]
        away.finishing = False
        trip = away.trip(len(away.path.relays), Leg.BACKWARD)
        send = SendBoundary(trip, slot, loss, keeps=True)
        return [*self._mender.kept.keep(send), *([send] if away.returns else [])]

    def returned(self, number: int, now_s: float) -> list[Command]:
        """The trainer has added the gradient."""
        away = self._away.pop(number, None)
        if away is None:
            return []
        self.counts[Counted.DONE] += 1
        self.counts[Counted.WITHOUT] += away.without
        passed = Tell(away.path.relays[:1], Passed(away.microbatch, away.attempt))
        return [passed, *self._mender.kept.drop(away.microbatch), *self._end_one()]

    def restarted(self, slots: int) -> list[Command]:
        """The trainer is a new one, knows of no microbatch, and has room for so many."""
        lost = list(self._away.values())
        self.counts[Counted.LOST] += sum(away.leg is not Leg.SCORE for away in lost)
        self._away.clear()
        self._mender.kept.clear(KEPT_PER_SLOT * slots)
        self._in_flight = slots if self._in_flight else 0
        offered = [Tell(path.relays, Lost(name)) for name, path in self._present.named.items()]
        self._present = OwnIteration()
        told: list[Command] = [away.lost() for away in lost]
        return [*told, *offered, *self._announce(self.iteration + 1)] if self.iteration else told

    def ticked(self, now_s: float) -> list[Command]:
        """Time has passed."""
        commands: list[Command] = []
        for before in list(self._present.again.values()):
            slot, is_late = before.slot, now_s - before.since_s >= self._patience_s
            if slot is not None and is_late:
                del self._present.again[before.number]
                self.counts[Counted.LOST] += 1
                commands += [Freed(slot), Drop(before.number), *self._end_one()]
            elif slot is not None:
                commands += self._other_way(before, slot)
        for away in list(self._away.values()):
            mending, is_late = away.mending, now_s - away.since_s >= self._patience_s
            strands = mending is not None and not mending.asked and self._another(away, 0)
            if strands and self._relays.are_long_gone(away.path.stages, now_s):
                is_late = True  # no stand-in has come, and others can leave its stage out
            if is_late and not away.home:
                commands += self._give_up(away)
            elif mending is not None and mending.silent:  # some have not answered
                silent = tuple(sorted(mending.silent & mending.asked))
                mending.silent.clear()
                commands.append(Tell(silent, Halt(away.microbatch, away.attempt)))
        return commands

    # --- setting out ------------------------------------------------------------------------------
    @property
    def missing_stages(self) -> tuple[int, ...]:
        """The stages that nobody holds; counted from 1, for the data peers hold stage 0."""
        return self._relays.missing

    def _set_out(self, now_s: float) -> list[Command]:
        """Choose paths for the iteration that has begun, if there are relays (rule 2)."""
        present, relays = self._present, self._relays
        if present.paths is not None or not present.left or not relays.stages:
            return []
        iteration = next_iteration(self.iteration, max(map(self._heard.middle_of, relays.stages)))
        paths = self._router.paths(iteration, present.left, relays.stages)
        if not paths or (relays.missing and not relays.trained):
            return []
        self.iteration, self.left_out, present.paths = iteration, relays.missing, deque(paths)
        return [*self._announce(self.iteration), *self._leave(now_s), *self._offer_ahead()]

    def _announce(self, iteration: int) -> list[Command]:
        """Tell all relays, unless they know."""
        if iteration <= self.announced:
            return []
        self.announced = iteration
        return [Tell(tuple(sorted(self._relays.all)), Announcement(iteration))]

    def _offer_ahead(self) -> list[Command]:
        """Name and offer what the trainer will produce next (rule 7)."""
        present, commands = self._present, list[Command]()
        under_way = sum(not away.nearly_home for away in self._away.values())
        under_way += len(present.again)
        while present.paths and under_way + len(present.named) < self._in_flight:
            microbatch, path = self._name(), present.paths.popleft()
            present.named[microbatch] = path
            commands.append(Trip(microbatch, Leg.FORWARD, path, 1))
        return commands

    def _name(self) -> Microbatch:
        self._next_index += 1
        return Microbatch(self._peer_id, self.iteration, self._next_index)

    def _leave(self, now_s: float) -> list[Command]:
        """Send what is ready, as far as there are paths."""
        present, commands = self._present, list[Command]()
        while present.ready and (present.named or present.paths):
            number, slot = present.ready.pop(0)
            self.counts[Counted.BEGUN] += 1
            if not present.named:
                assert present.paths, "the loop goes on while there are some"
                present.named[self._name()] = present.paths.popleft()
            microbatch = next(iter(present.named))
            path = present.named.pop(microbatch)
            commands.append(self._send(Leg.FORWARD, number, slot, path, now_s, microbatch))
        return commands

    def _other_way(self, before: Away, slot: int) -> list[Command]:
        """Set out over another path, under another name; wait where there is none."""
        path = self._another(before, self._next_index + before.setouts)
        if path is None:
            return []
        number = self._present.again.pop(before.number).number
        send = self._send(Leg.FORWARD, number, slot, path, before.since_s, self._name())
        self._away[number].setouts = before.setouts + 1
        return [send]

    def _another(self, before: Away, turn: int) -> Path | None:
        return self._router.another(before.path, turn, self._relays.sound)

    def _score(self, number: int, slot: int, now_s: float) -> list[Command]:
        """Send what is to be scored, through all stages."""
        stages = () if self._relays.missing else self._relays.stages
        path = self._router.whole(self._next_index, stages) if stages else None
        if path is None:
            return [Freed(slot), Drop(number)]
        return [self._send(Leg.SCORE, number, slot, path, now_s, self._name())]

    def _send(
        self, leg: Leg, number: int, slot: int, path: Path, since_s: float, name: Microbatch
    ) -> Command:
        away = Away(number, name, path, since_s, leg, without=bool(self._relays.missing))
        self._away[number] = away
        return SendBoundary(Trip(name, leg, path, 1), slot, None)

    # --- losing -----------------------------------------------------------------------------------
    def _find(self, microbatch: Microbatch) -> Away | None:
        for away in self._away.values():
            if away.microbatch == microbatch:
                return away
        return None

    def _lose(self, away: Away) -> list[Command]:
        """It will not come back as it is (rules 3 and 4)."""
        if away.home:
            return []
        if away.can_be_mended and away.leg is Leg.FORWARD and away.attempt < MENDS:
            return self._mender.mend(away)
        if away.can_be_mended or away.leg is Leg.SCORE or away.setouts >= ATTEMPTS:
            return self._give_up(away)
        self._present.again[away.number] = self._away.pop(away.number)
        self.counts[Counted.AGAIN] += 1
        return [away.lost(), Resend(away.number)]

    def _give_up(self, away: Away) -> list[Command]:
        del self._away[away.number]
        gone = [Drop(away.number), away.lost(), *self._mender.kept.drop(away.microbatch)]
        if away.leg is Leg.SCORE:
            return gone
        self.counts[Counted.LOST] += 1
        return [*gone, *self._end_one()]

    def _end_one(self) -> list[Command]:
        """One more microbatch has come to its end; after the last, relays may step (rule 1)."""
        self._present.left -= 1
        return self._announce(self.iteration + 1) if not self._present.left else []
