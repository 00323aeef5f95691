"""The core of a data peer: which way its microbatches go, and what has become of them.

Rules
  1. An iteration's number is the next one, or where the middle of a stage is, by what its relays
     have told: that of the furthest stage, because each is needed. So data peers that are behind
     catch up, by a bounded leap (iterations.py), and one relay that lies among others moves nobody.
     A data peer announces an iteration when nothing of the one before is under way any longer
     (relay.py). A relay that misses this waits for us, and others for the relay, so it is said
     again every tick, until it is noted or a later one is announced.
  2. A router chooses paths when an iteration sets out, over the relays that are there then. All of
     them leave out a stage that nobody holds now, if paths may be so; where they may not, and
     before anything has been trained, the iteration waits for somebody to come. What is left out
     gets no gradient (`without`).
  3. A microbatch is lost when a hop of it fails, when a relay says so, or when a relay of its path
     is no longer there. The relays of its path are told to forget this *attempt*, and the
     microbatch sets out again in the next one, under the same name, ATTEMPTS times at most.
     If it had not come to the loss yet, no stage has its gradient: it sets out at once, and avoids
     the relays that have failed in this iteration.
     If it had, some relays may have added its gradient already. The microbatch waits until every
     relay of its path has noted the loss, or is gone. Its new path keeps all relays that are there
     and replaces the others. Neither a relay that has added the gradient nor the head adds it
     again. So a stage counts a gradient twice only if the data peer has lost sight of a relay that
     lives on for its stage.
     From the second loss on, and where there is no path, the microbatch waits for the next tick: by
     then it is known who is gone.
  4. A microbatch for which there is no other way is given up, and so is one that is not back after
     `patience_s`.
  5. What a relay had added goes with it if it dies before the step; it is counted (`gone`). A relay
     steps with an iteration's gradients before it takes a microbatch of the next, and begins none
     until all data peers have. So it has stepped once something has come through it in a later
     iteration, or a later one has ended.
  6. The next microbatches, as many as the trainer keeps under way, are named and offered to their
     first relays before the trainer has produced them: when an iteration sets out, and when one is
     about to come home.
  7. Each hop to us is welcome once in each attempt, again only if it breaks off.
  8. A boundary that cannot be right (sizes.py), here or at a relay, makes its sender one that has
     failed. So does a relay's word against another, whose gradient it has refused; that is believed
     once for each microbatch: a relay that refuses those of two is the odd one itself.
  9. Of some that have come to the loss, copies set out over other relays of a stage (checks.py). A
     copy goes once, as a score does. The relays that are left out for what they make get no
     microbatch, unless nobody else holds their stage; what they have under way comes home.

Invariant: the trainer is told exactly one end of every microbatch: its gradient, or that it is
dropped.

Source: SWARM (Ryabinin et al., 2023) sends what a dead peer held through another, from the trainer.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from protocol.outcomes import RefusalReason
from protocol.routing.routers import RandomRouter
from protocol.wire.messages import Refusal
from protocol.wire.stage_messages import (
    Announcement,
    Direction,
    Hop,
    Lost,
    Microbatch,
    Noted,
    Notice,
    Path,
    RelaysByStage,
)

from .checks import Check, Checks, Compare, Read
from .core import (
    AnswerOffer,
    Command,
    MicrobatchEvent,
    OfferAhead,
    SendBoundary,
    SendNotice,
    StageCore,
)
from .iterations import Announced, next_iteration
from .trainer_messages import Drop, Filled, Freed, Resend

# --- relays ---------------------------------------------------------------------------------------


class RelaysThere:
    """The relays that a data peer can send microbatches to.

    Attributes:
        stages: the peers of each stage from the second on that train, sorted.
        failed: those that have lost a microbatch in this iteration; others are preferred.
        odd: those that are left out for what they make (checks.py).
        trained: whether the run has been: before that a stage has not come yet, rather than gone.
        unstepped: the newest iteration of which each has added gradients, and how many (rule 5).
    """

    def __init__(self) -> None:
        self.stages: RelaysByStage = ()
        self.all: frozenset[str] = frozenset()
        self.failed: set[str] = set()
        self.odd: set[str] = set()
        self.trained = False
        self.unstepped: dict[str, tuple[int, int]] = {}

    def update(self, stages: RelaysByStage) -> tuple[frozenset[str], int]:
        """Take over who is there now. Returns who has come, and the gradients that have gone."""
        before, self.stages = self.all, stages
        self.all = frozenset(relay for stage in stages for relay in stage)
        come, gone = self.all - before, before - self.all
        self.failed.difference_update(come)
        self.failed.update(gone)
        return come, sum(self.unstepped.pop(relay, (0, 0))[1] for relay in gone)

    @property
    def missing(self) -> tuple[int, ...]:
        """The stages that nobody holds; counted from 1, because the data peers hold stage 0."""
        return tuple(stage for stage, peers in enumerate(self.stages, 1) if not peers)

    @property
    def sound(self) -> RelaysByStage:
        return without_failed(self.stages, self.odd)

    def added(self, relays: Iterable[str], iteration: int) -> None:
        """Relays have added a microbatch of that iteration, and stepped with those before."""
        for relay in relays:
            newest, gradients = self.unstepped.get(relay, (iteration, 0))
            self.unstepped[relay] = iteration, gradients + 1 if newest == iteration else 1


def without_failed(relays: RelaysByStage, failed: set[str]) -> RelaysByStage:
    """The relays that have not failed; a stage where all have is as it is."""
    return tuple(
        tuple(relay for relay in stage if relay not in failed) or stage for stage in relays
    )


# --- microbatches ---------------------------------------------------------------------------------
ATTEMPTS: Final = 8
"""Times that a microbatch sets out, at most."""


@dataclass(slots=True)
class SentMicrobatch:
    """A microbatch on its way.

    Attributes:
        since_s: when it set out first.
        without: whether a stage had nobody when it set out.
        attempt: how often it has been lost.
        waits: whether it was lost, and has not set out again.
        slot: where it lies, produced once more, while it waits for another path; None else.
        nearly_home: whether its gradient has come as far as its last hop.
        losses: the attempts of which the trainer is at the loss.
        reached_loss: whether it has come to the loss: stages may have added its gradient.
        home: whether its gradient is here.
        unheard: relays that have not noted yet that it was lost.
        accused, accusers: relays whose gradient was refused, and that have refused one.
        check: that it is part of, if any.
        copies: the paths of its copies that have not set out.
    """

    number: int
    microbatch: Microbatch
    path: Path
    since_s: float
    direction: Direction
    without: bool = False
    attempt: int = 0
    waits: bool = False
    slot: int | None = None
    nearly_home: bool = False
    losses: list[int] = field(default_factory=list)
    reached_loss: bool = False
    home: bool = False
    unheard: set[str] = field(default_factory=set)
    accused: set[str] = field(default_factory=set)
    accusers: set[str] = field(default_factory=set)
    check: Check | None = None
    copies: list[Path] = field(default_factory=list)

    def is_due(self, hop: Hop) -> bool:
        is_for_this = (hop.direction is Direction.SCORE) == (self.direction is Direction.SCORE)
        return is_for_this and hop.attempt == self.attempt and not (self.waits or self.home)

    def lost_notice(self) -> SendNotice:
        return SendNotice(self.path.relays, Lost(self.microbatch, self.attempt))


@dataclass(slots=True)
class OwnIteration:
    """The iteration that the trainer has begun.

    Attributes:
        left: microbatches that have not come to an end.
        paths: of those that have no name yet; None until there are relays.
        named: those that have one, and have not set out (rule 6).
        seen: numbers of those that the trainer has produced.
        ready: (number, slot) of those that could set out, and wait for a path.
        welcomed: the hops to us that were let come: (microbatch, direction, attempt).
    """

    left: int = 0
    paths: deque[Path] | None = None
    named: dict[Microbatch, Path] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    ready: list[tuple[int, int]] = field(default_factory=list)
    welcomed: set[tuple[Microbatch, Direction, int]] = field(default_factory=set)


@dataclass(eq=False)
class DataPeerCore(StageCore):
    """Sends the microbatches of a data peer on their ways, and again what is lost.

    Args:
        patience_s: longest time from a microbatch's beginning to its end.
        in_flight: microbatches that the trainer keeps under way, at most (rule 6).
        checks: of what relays make; none without a seed.

    Attributes:
        iteration: the present one; 0 before the first.
        announced: the newest that relays were told of; 0 before the first.
        left_out: the stages that nobody held when the present iteration set out.
    """

    _peer_id: str
    _router: RandomRouter
    _patience_s: float
    in_flight: int = 0
    checks: Checks = field(default_factory=Checks)

    def __post_init__(self) -> None:
        super().__init__()
        self._sent_out: dict[int, SentMicrobatch] = {}
        self._current = OwnIteration()
        self._heard = Announced()
        self._next_index = 0
        self._relays = RelaysThere()
        self._deaf: set[str] = set()  # relays that have not noted what was announced last
        self.iteration = self.announced = 0
        self.left_out: tuple[int, ...] = ()

    # --- what peers say ---------------------------------------------------------------------------
    def peers_changed(self, relays: RelaysByStage, now_s: float, *, trained: bool) -> list[Command]:
        """Take the sorted peers of each later stage, and whether the run is trained."""
        come, gone = self._relays.update(relays)
        self._relays.trained = trained
        self._relays.odd = self.checks.left_out(self._relays.all, now_s)
        self._heard.update_present(self._relays.all)
        self.counts[MicrobatchEvent.GONE] += gone
        commands: list[Command] = []
        if come and self.announced:
            self._deaf |= come
            commands.append(SendNotice(tuple(sorted(come)), Announcement(self.announced)))
        for sent in list(self._sent_out.values()):
            if not self._relays.all.issuperset(sent.path.relays):
                commands += self._lose(sent)
        return [*commands, *self._set_out(now_s)]

    def on_message(
        self, sender: str, message: Notice, now_s: float
    ) -> tuple[Noted | Refusal, list[Command]]:
        """A relay says something. Returns the answer, too."""
        if isinstance(message, Lost):
            commands = self.lost(message, sender)
            return Noted(self.iteration), commands
        # Said to the relay that we were before we went over to this stage.
        sentence = f"a {type(message).__name__} is not for this stage"
        return Refusal(RefusalReason.OTHER_GROUP, sentence), []

    def noted(self, peer_id: str, message: Notice, answer: Noted) -> list[Command]:
        match message:
            case Announcement(iteration):
                self._heard.add(peer_id, answer.iteration)
                if iteration == self.announced:
                    self._deaf.discard(peer_id)
            case Lost(microbatch, attempt):
                sent = self._find(microbatch)
                if sent is not None and sent.attempt == attempt + 1:
                    sent.unheard.discard(peer_id)
                    return self._set_out_again(sent) if attempt == 0 else []
        return []

    def lost(self, told: Lost, relay: str) -> list[Command]:
        """A relay has forgotten it, or cannot send it on; only one of its path may say so."""
        lost, named = told.microbatch, self._current.named
        if lost in named and relay in named[lost].relays:
            other = self._name()  # which nobody has forgotten
            self._current.named = {other if m == lost else m: path for m, path in named.items()}
            return [SendNotice(named[lost].relays, Lost(lost))]
        sent = self._find(lost)
        if sent is None or relay not in sent.path.relays or told.attempt > sent.attempt:
            return []
        is_current = told.attempt == sent.attempt
        if is_current or told.refused:  # the one it names may have told us first that it is lost
            self._blamed(sent, relay, told)
        return self._lose(sent) if is_current else []

    def _blamed(self, sent: SentMicrobatch, by: str, told: Lost) -> None:
        """A relay names another of the path, that has failed (rule 8); itself, if nobody."""
        relay, path = told.failed or by, sent.path.relays
        if relay not in path:
            return
        if told.refused and sent.reached_loss and path.index(relay) > path.index(by):
            if by in sent.accusers:
                relay = by
            sent.accusers.add(by)
            sent.accused.add(relay)
        self._relays.failed.add(relay)

    def offered(self, ticket: int, hop: Hop) -> list[Command]:
        sent = self._find(hop.microbatch)
        path = self._current.named.get(hop.microbatch) if sent is None else sent.path
        is_here = hop.place in (0, len(hop.path.relays) + 1)
        if path != hop.path or not is_here or (sent and not sent.is_due(hop)):
            return [AnswerOffer(ticket, RefusalReason.UNAVAILABLE)]
        name, welcomed = (hop.microbatch, hop.direction, hop.attempt), self._current.welcomed
        if name in welcomed:
            return [AnswerOffer(ticket, RefusalReason.TWICE)]
        welcomed.add(name)
        if sent is None:
            return [AnswerOffer(ticket)]  # offered ahead all along its path
        sent.nearly_home = hop.place == 0
        return [AnswerOffer(ticket), *self._offer_ahead()]

    def withdrawn(self, ticket: int) -> list[Command]:
        """An offer was withdrawn: a data peer queues none."""
        return []

    def arrived(self, hop: Hop, slot: int, loss: float | None) -> list[Command]:
        sent = self._find(hop.microbatch)
        if sent is None or not sent.is_due(hop):
            return [Freed(slot)]
        sent.reached_loss = True
        if hop.direction is Direction.SCORE:
            del self._sent_out[sent.number]
            if sent.check is not None:
                return [_read(sent.check, sent.path, slot), Freed(slot)]
        elif hop.direction is Direction.BACKWARD:
            sent.home = True
            self._relays.added(sent.path.relays, sent.microbatch.iteration)
        else:
            sent.losses.append(sent.attempt)
            return self._reached_loss(sent, Filled(hop.direction, sent.number, slot, loss))
        return [Filled(hop.direction, sent.number, slot, loss)]

    def broke_off(self, hop: Hop, now_s: float, *, refused: bool = False) -> list[Command]:
        self._current.welcomed.discard((hop.microbatch, hop.direction, hop.attempt))
        sent = self._find(hop.microbatch)
        if refused:
            self.counts[MicrobatchEvent.REFUSED] += 1
            self._relays.failed.add(hop.sender)
            if sent is not None:
                sent.accused.add(hop.sender)
        return [] if sent is None or not sent.is_due(hop) else self._lose(sent)

    def sent(self, hop: Hop, now_s: float, *, taken: bool) -> list[Command]:
        sent = self._find(hop.microbatch)
        return [] if taken else self._failed(sent, hop.attempt, hop.receiver)

    # --- what the trainer says --------------------------------------------------------------------
    def begun(self, microbatches: int, now_s: float) -> list[Command]:
        self._current = OwnIteration(microbatches)
        self._relays.failed.clear()
        unstepped, ended = self._relays.unstepped.items(), self.iteration
        self._relays.unstepped = {relay: each for relay, each in unstepped if each[0] >= ended}
        return self._set_out(now_s)

    def produced(
        self, direction: Direction, number: int, slot: int, loss: float | None, now_s: float
    ) -> list[Command]:
        current, sent = self._current, self._sent_out.get(number)
        if direction is Direction.SCORE:
            return self._score(number, slot, now_s)
        if direction is Direction.FORWARD and sent is None and number not in current.seen:
            current.seen.add(number)
            current.ready.append((number, slot))
            return self._leave(now_s)
        if direction is Direction.FORWARD and sent is not None and sent.waits:
            sent.slot = slot
            return self._set_out_again(sent) if sent.attempt == 1 else []
        if direction is Direction.FORWARD and sent is not None and sent.copies:
            copy, path = self._name(), sent.copies.pop()
            score = SentMicrobatch(
                -copy.index, copy, path, now_s, Direction.SCORE, check=sent.check
            )
            return [self._send(score, slot)]
        if (
            sent is None
            or direction is Direction.FORWARD
            or sent.losses.pop(0) < sent.attempt
            or sent.waits
        ):
            return [Freed(slot)]
        place = len(sent.path.relays)
        hop = Hop(sent.microbatch, Direction.BACKWARD, sent.path, place, sent.attempt)
        return [SendBoundary(hop, slot, loss)]

    def returned(self, number: int, now_s: float) -> list[Command]:
        sent = self._sent_out.pop(number, None)
        if sent is None:
            return []
        self.counts[MicrobatchEvent.DONE] += 1
        self.counts[MicrobatchEvent.WITHOUT] += sent.without
        return self._end_one()

    def restarted(self, slots: int) -> list[Command]:
        lost = list(self._sent_out.values())
        self.counts[MicrobatchEvent.LOST] += sum(
            sent.direction is not Direction.SCORE for sent in lost
        )
        self._sent_out.clear()
        self.in_flight = slots if self.in_flight else 0
        offered = [
            SendNotice(path.relays, Lost(name)) for name, path in self._current.named.items()
        ]
        self._current = OwnIteration()
        told: list[Command] = [sent.lost_notice() for sent in lost]
        return [*told, *offered, *self._announce(self.iteration + 1)] if self.iteration else told

    def ticked(self, now_s: float) -> list[Command]:
        commands: list[Command] = []
        if self._deaf:
            commands.append(SendNotice(tuple(sorted(self._deaf)), Announcement(self.announced)))
        for sent in list(self._sent_out.values()):
            if now_s - sent.since_s >= self._patience_s and not sent.home:
                commands += self._give_up(sent)
                continue
            if again := tuple(sorted(sent.unheard & self._relays.all)):
                commands.append(SendNotice(again, Lost(sent.microbatch, sent.attempt - 1)))
            if sent.waits:
                commands += self._set_out_again(sent)
        return commands

    # --- setting out ------------------------------------------------------------------------------
    @property
    def missing_stages(self) -> tuple[int, ...]:
        return self._relays.missing

    def _set_out(self, now_s: float) -> list[Command]:
        """Choose paths for the iteration that has begun, if there are relays (rule 2)."""
        current, relays = self._current, self._relays
        if current.paths is not None or not current.left or not relays.stages:
            return []
        iteration = next_iteration(self.iteration, max(map(self._heard.middle_of, relays.stages)))
        self._router.draws_all = self.checks.is_suspecting
        paths = self._router.paths(iteration, current.left, relays.sound)
        if not paths or (relays.missing and not relays.trained):
            return []
        self.iteration, self.left_out, current.paths = iteration, relays.missing, deque(paths)
        return [*self._announce(self.iteration), *self._leave(now_s), *self._offer_ahead()]

    def _announce(self, iteration: int) -> list[Command]:
        if iteration <= self.announced:
            return []
        self.announced, self._deaf = iteration, set(self._relays.all)
        return [SendNotice(tuple(sorted(self._deaf)), Announcement(iteration))]

    def _offer_ahead(self) -> list[Command]:
        """Name and offer what the trainer will produce next (rule 6)."""
        current, commands = self._current, list[Command]()
        sent = self._sent_out.values()
        under_way = sum(
            not each.nearly_home and each.direction is not Direction.SCORE for each in sent
        )
        while current.paths and under_way + len(current.named) < self.in_flight:
            microbatch, path = self._name(), current.paths.popleft()
            current.named[microbatch] = path
            commands.append(OfferAhead(Hop(microbatch, Direction.FORWARD, path, 1)))
        return commands

    def _name(self) -> Microbatch:
        self._next_index += 1
        return Microbatch(self._peer_id, self.iteration, self._next_index)

    def _leave(self, now_s: float) -> list[Command]:
        current, commands = self._current, list[Command]()
        while current.ready and (current.named or current.paths):
            number, slot = current.ready.pop(0)
            self.counts[MicrobatchEvent.BEGUN] += 1
            if not current.named:
                assert current.paths, "the loop goes on while there are some"
                current.named[self._name()] = current.paths.popleft()
            microbatch = next(iter(current.named))
            sent = SentMicrobatch(
                number, microbatch, current.named.pop(microbatch), now_s, Direction.FORWARD
            )
            commands.append(self._send(sent, slot))
        return commands

    def _set_out_again(self, sent: SentMicrobatch) -> list[Command]:
        """Set out once more, if there is a way, and the trainer has produced it."""
        relays, slot, turn = self._relays, sent.slot, sent.microbatch.index + sent.attempt
        is_awaited = sent.reached_loss and not sent.unheard.isdisjoint(relays.all)
        if not sent.waits or slot is None or is_awaited:
            return []
        # One that may have added its gradient is kept, odd or not.
        sound = (
            without_failed(relays.stages, sent.accused)
            if sent.reached_loss
            else without_failed(relays.sound, relays.failed)
        )
        path = self._router.another(sent.path, turn, sound, reached_loss=sent.reached_loss)
        if path is None:
            return []
        sent.path, sent.waits, sent.slot = path, False, None
        return [self._send(sent, slot)]

    def _score(self, number: int, slot: int, now_s: float) -> list[Command]:
        stages = () if self._relays.missing else self._relays.sound
        path = self._router.whole(self._next_index, stages) if stages else None
        if path is None:
            return [Freed(slot), Drop(number)]
        return [
            self._send(SentMicrobatch(number, self._name(), path, now_s, Direction.SCORE), slot)
        ]

    def _send(self, sent: SentMicrobatch, slot: int) -> Command:
        self._sent_out[sent.number], sent.without = sent, bool(self._relays.missing)
        return SendBoundary(
            Hop(sent.microbatch, sent.direction, sent.path, 1, sent.attempt), slot, None
        )

    # --- checks -----------------------------------------------------------------------------------
    def _reached_loss(self, sent: SentMicrobatch, filled: Filled) -> list[Command]:
        """A microbatch has come to the loss; have copies produced if it is checked (rule 9)."""
        drawn = self.checks.draw(sent.microbatch, sent.path, self._relays.sound)
        if drawn is None:
            return [filled]
        sent.check, sent.copies = drawn
        produced = [Resend(sent.number) for _ in sent.copies]
        return [_read(sent.check, sent.path, filled.slot), filled, *produced]

    def read(self, check: Check, relay: str, codes: bytes) -> list[Command]:
        """Take the output of one relay for a check."""
        check.outputs[relay] = codes
        return _compare(check)

    def compared(self, check: Check, distances: Sequence[float], now_s: float) -> list[Command]:
        self.counts[MicrobatchEvent.CHECKED] += 1
        differing = self.checks.judge(check, distances, now_s)
        self._relays.odd = self.checks.left_out(self._relays.all, now_s)
        return [] if differing is None else [differing]

    # --- losing -----------------------------------------------------------------------------------
    def _find(self, microbatch: Microbatch) -> SentMicrobatch | None:
        for sent in self._sent_out.values():
            if sent.microbatch == microbatch:
                return sent
        return None

    def _failed(self, sent: SentMicrobatch | None, attempt: int, relay: str) -> list[Command]:
        if sent is None or attempt != sent.attempt or relay not in sent.path.relays:
            return []
        self._relays.failed.add(relay)
        return self._lose(sent)

    def _lose(self, sent: SentMicrobatch) -> list[Command]:
        """Begin the next attempt of a lost microbatch, or give it up (rule 3)."""
        if sent.home or sent.waits:
            return []
        if sent.direction is Direction.SCORE or sent.attempt + 1 >= ATTEMPTS:
            return self._give_up(sent)
        told, sent.unheard = sent.lost_notice(), set(sent.path.relays)
        sent.attempt, sent.waits, sent.nearly_home = sent.attempt + 1, True, False
        self.counts[MicrobatchEvent.MENDED if sent.reached_loss else MicrobatchEvent.AGAIN] += 1
        return [told, Resend(sent.number)]

    def _give_up(self, sent: SentMicrobatch) -> list[Command]:
        del self._sent_out[sent.number]
        if sent.check is not None and sent.direction is Direction.SCORE:
            sent.check.awaited -= 1
            return [sent.lost_notice(), *_compare(sent.check)]
        gone: list[Command] = [Drop(sent.number), sent.lost_notice()]
        if sent.slot is not None:
            gone.append(Freed(sent.slot))
        if sent.direction is Direction.SCORE:
            return gone
        self.counts[MicrobatchEvent.LOST] += 1
        return [*gone, *self._end_one()]

    def _end_one(self) -> list[Command]:
        """Count a microbatch that has come to its end; after the last, relays may step (rule 1)."""
        self._current.left -= 1
        return self._announce(self.iteration + 1) if not self._current.left else []


def _read(check: Check, path: Path, slot: int) -> Command:
    return Read(check, path.relays[check.place], slot)


def _compare(check: Check) -> list[Command]:
    return [Compare(check)] if check.is_due else []
