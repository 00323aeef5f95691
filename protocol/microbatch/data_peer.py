"""The core of a data peer: which way its microbatches go, and what has become of them.

Rules
  1. An iteration's number is the next one, or the newest that any relay has heard of: data peers
     that are behind catch up at once. A data peer announces an iteration when nothing of the one
     before is under way any more (relay.py).
  2. A router (paths.py) chooses paths when an iteration sets out, over the relays that are there
     then. It sets out
     when every stage has one: until then its microbatches wait where they are, and nothing is
     trained.
  3. A microbatch is lost when a trip of it fails, when a relay says so, and when a relay of its
     path is no longer there. On its way to the loss it has left no gradient anywhere: it sets out
     again, under a new name, past the relays that have failed in this iteration, ATTEMPTS times at
     most. The relays of its old path are told to forget it.
  4. One that is lost on its way back is given up: some stages have added its gradient, and another
     replica could not know. So is one that is not back after `patience_s`. The trainer leaves it
     out of its step.
  5. The next microbatches, as many as the trainer keeps under way, are named and offered to their
     first relays before the trainer has produced them: when an iteration sets out, and when one is
     about to come home.

Invariant: the trainer is told exactly one end of every microbatch: its gradient, or that it is
dropped.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from protocol.outcomes import RefusalReason

from .commands import (
    Announce,
    Answer,
    Command,
    Compute,
    Forget,
    FreeInbound,
    OfferAhead,
    Release,
    Resend,
    Send,
    TellLost,
)
from .counts import Counted
from .paths import Path, Relays, Router
from .trip import Leg, Microbatch, Trip

ATTEMPTS: Final = 4
"""Times that a microbatch sets out, at most."""


@dataclass(slots=True)
class _Away:
    """A microbatch on its way.

    Attributes:
        way: its path, with stages.
        since_s: when it set out first.
        attempt: 1 for the first.
        turned: whether its gradient is on its way back.
        nearly_home: whether that has come as far as its last hop.
    """

    number: int
    microbatch: Microbatch
    way: Path
    since_s: float
    leg: Leg
    attempt: int = 1
    turned: bool = False
    nearly_home: bool = False

    @property
    def path(self) -> tuple[str, ...]:
        """The relays that it visits."""
        return self.way.relays


@dataclass(slots=True)
class _Iteration:
    """What the trainer has begun.

    Attributes:
        left: microbatches that have not come to an end.
        paths: of those that have no name yet; None until there are relays.
        named: those that have one, and have not set out (rule 5).
        ready: (number, slot) of those that could set out, and wait for a path.
        again: those that set out again as soon as the trainer has produced them once more.
        failed: relays that have lost a microbatch.
    """

    left: int = 0
    paths: deque[Path] | None = None
    named: deque[tuple[Microbatch, Path]] = field(default_factory=deque)
    ready: list[tuple[int, int]] = field(default_factory=list)
    again: dict[int, _Away] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)


class DataPeerCore:
    """See the top of the file. Every event returns what is to be done.

    Args:
        peer_id: ours.
        router: chooses paths.
        patience_s: longest time from a microbatch's beginning to its end.
        in_flight: microbatches that the trainer keeps under way, at most; rule 5 is about so many.

    Attributes:
        iteration: the present one; 0 before the first.
        counts: since the start.
    """

    def __init__(
        self, peer_id: str, router: Router, patience_s: float, *, in_flight: int = 0
    ) -> None:
        self._peer_id = peer_id
        self._router = router
        self._patience_s = patience_s
        self._in_flight = in_flight
        self._away: dict[int, _Away] = {}
        self._present = _Iteration()
        self._heard = 0
        self._announced = 0
        self._next_index = 0
        self._relays: Relays = ()
        self.iteration = 0
        self.counts: Counter[Counted] = Counter()

    def __repr__(self) -> str:
        return f"<DataPeerCore in iteration {self.iteration}, {len(self._away)} on their way>"

    # --- what peers say ---------------------------------------------------------------------------
    def present(self, relays: Relays, now_s: float) -> list[Command]:
        """The peers of each stage from the second on that train, sorted."""
        self._relays = relays
        there = {relay for stage in relays for relay in stage}
        lost = [away for away in self._away.values() if not there.issuperset(away.path)]
        for away in lost:
            self._present.failed.update(set(away.path) - there)
        commands = [command for away in lost for command in self._lose(away)]
        return [*commands, *self._set_out(now_s)]

    def heard(self, iteration: int) -> list[Command]:
        """A relay has heard of this iteration."""
        self._heard = max(self._heard, iteration)
        return []

    def lost(self, microbatch: Microbatch, relay: str) -> list[Command]:
        """A relay has forgotten it; only one of its path may say so."""
        for place, (name, path) in enumerate(self._present.named):
            if name == microbatch and relay in path.relays:
                self._present.named[place] = self._name(), path  # which nobody has forgotten
        away = self._find(microbatch)
        return [] if away is None or relay not in away.path else self._lose(away)

    def offered(self, ticket: int, trip: Trip) -> list[Command]:
        """A boundary is offered."""
        away = self._find(trip.microbatch)
        path = self._named_path(trip.microbatch) if away is None else away.path
        if path != trip.path or trip.place not in (0, len(trip.path) + 1):
            return [Answer(ticket, RefusalReason.UNAVAILABLE)]
        if away is None:
            return [Answer(ticket)]  # offered ahead all along its path, before it has set out
        away.nearly_home = trip.place == 0
        return [Answer(ticket), *self._offer_ahead()]

    def withdrawn(self, ticket: int) -> list[Command]:
        """Nothing waits here."""
        return []

    def arrived(self, trip: Trip, slot: int, loss: float | None) -> list[Command]:
        """What was welcome lies in this inbound slot."""
        away = self._find(trip.microbatch)
        if away is None:
            return [FreeInbound(slot)]
        if trip.leg is Leg.SCORE:
            del self._away[away.number]
        away.turned = True
        return [Compute(trip.leg, away.number, slot, loss)]

    def broke_off(self, trip: Trip, now_s: float) -> list[Command]:
        """What was welcome has not come whole."""
        away = self._find(trip.microbatch)
        return [] if away is None else self._lose(away)

    def sent(self, trip: Trip, now_s: float, *, taken: bool) -> list[Command]:
        """What was to be sent has been taken by the other, or has not."""
        away = self._find(trip.microbatch)
        if taken or away is None:
            return []
        self._present.failed.add(trip.receiver)
        return self._lose(away)

    # --- what the trainer says --------------------------------------------------------------------
    def begun(self, microbatches: int, now_s: float) -> list[Command]:
        """The trainer begins an iteration."""
        self._present = _Iteration(microbatches)
        return self._set_out(now_s)

    def produced(
        self, leg: Leg, number: int, slot: int, loss: float | None, now_s: float
    ) -> list[Command]:
        """The trainer has made what leaves."""
        if leg is Leg.SCORE:
            return self._score(number, slot, now_s)
        if leg is Leg.FORWARD and number in self._present.again:
            return self._set_out_again(number, slot)
        if leg is Leg.FORWARD:
            self._present.ready.append((number, slot))
            return self._leave(now_s)
        away = self._away.get(number)
        if away is None:
            return [Release(slot)]
        return [Send(Trip.begin(away.microbatch, leg, away.way, len(away.path)), slot, loss)]

    def returned(self, number: int, now_s: float) -> list[Command]:
        """The trainer has added the gradient."""
        if self._away.pop(number, None) is None:
            return []
        self.counts[Counted.DONE] += 1
        return self._end_one()

    def restarted(self) -> list[Command]:
        """The trainer is a new one, and knows of no microbatch."""
        lost = [away.microbatch for away in self._away.values()]
        self.counts[Counted.LOST] += len(lost)
        self._away.clear()
        offered = [TellLost(name, path.relays) for name, path in self._present.named]
        self._present = _Iteration()
        told: list[Command] = [*(TellLost(microbatch) for microbatch in lost), *offered]
        return [*told, *self._announce(self.iteration + 1)] if self.iteration else told

    def ticked(self, now_s: float) -> list[Command]:
        """Time has passed."""
        late = [a for a in self._away.values() if now_s - a.since_s >= self._patience_s]
        return [command for away in late for command in self._give_up(away)]

    # --- setting out ------------------------------------------------------------------------------
    @property
    def missing_stages(self) -> tuple[int, ...]:
        """The stages that nobody holds; counted from 1, for the data peers hold stage 0."""
        return tuple(stage for stage, peers in enumerate(self._relays, 1) if not peers)

    def _set_out(self, now_s: float) -> list[Command]:
        """Choose paths for the iteration that has begun, if there are relays (rule 2)."""
        present = self._present
        if present.paths is not None or not present.left:
            return []
        if not self._relays or self.missing_stages:
            return []
        self.iteration = max(self.iteration + 1, self._heard)
        present.paths = deque(self._router.paths(self.iteration, present.left, self._relays))
        return [*self._announce(self.iteration), *self._leave(now_s), *self._offer_ahead()]

    def _announce(self, iteration: int) -> list[Command]:
        """Tell all relays, unless they know."""
        if iteration <= self._announced:
            return []
        self._announced = iteration
        return [Announce(iteration, tuple(relay for stage in self._relays for relay in stage))]

    def _offer_ahead(self) -> list[Command]:
        """Name and offer what the trainer will produce next (rule 5)."""
        present, commands = self._present, list[Command]()
        under_way = sum(not away.nearly_home for away in self._away.values()) + len(present.again)
        while present.paths and under_way + len(present.named) < self._in_flight:
            microbatch, path = self._name(), present.paths.popleft()
            present.named.append((microbatch, path))
            commands.append(OfferAhead(Trip.begin(microbatch, Leg.FORWARD, path, 1)))
        return commands

    def _named_path(self, microbatch: Microbatch) -> tuple[str, ...] | None:
        """The relays of one that has a name, and has not set out."""
        found = (path.relays for name, path in self._present.named if name == microbatch)
        return next(found, None)

    def _name(self) -> Microbatch:
        self._next_index += 1
        return Microbatch(self._peer_id, self.iteration, self._next_index)

    def _leave(self, now_s: float) -> list[Command]:
        """Send what is ready, as far as there are paths."""
        commands: list[Command] = []
        present = self._present
        while present.ready and (present.named or present.paths):
            number, slot = present.ready.pop(0)
            self.counts[Counted.BEGUN] += 1
            if present.named:
                microbatch, path = present.named.popleft()
            else:
                assert present.paths, "the loop goes on while there are some"
                microbatch, path = self._name(), present.paths.popleft()
            commands.append(self._send(Leg.FORWARD, number, slot, path, now_s, microbatch))
        return commands

    def _set_out_again(self, number: int, slot: int) -> list[Command]:
        """Rule 3: the same microbatch, another name and path."""
        before = self._present.again.pop(number)
        path = self._other_path(before)
        if path is None:
            self.counts[Counted.LOST] += 1
            return [Release(slot), Forget(number), *self._end_one()]
        send = self._send(Leg.FORWARD, number, slot, path, before.since_s)
        self._away[number].attempt = before.attempt + 1
        return [send]

    def _other_path(self, before: _Away) -> Path | None:
        """A path past the relays that have failed; None when a stage has no other."""
        there = tuple(
            tuple(relay for relay in stage if relay not in self._present.failed)
            for stage in self._relays
        )
        return self._router.another(before.way, self._next_index + before.attempt, there)

    def _score(self, number: int, slot: int, now_s: float) -> list[Command]:
        """Send what is to be scored, through all stages."""
        if not self._relays or self.missing_stages:
            return [Release(slot), Forget(number)]
        path = self._router.whole(self._next_index, self._relays)
        if path is None:
            return [Release(slot), Forget(number)]
        return [self._send(Leg.SCORE, number, slot, path, now_s)]

    def _send(
        self,
        leg: Leg,
        number: int,
        slot: int,
        path: Path,
        since_s: float,
        name: Microbatch | None = None,
    ) -> Command:
        microbatch = self._name() if name is None else name
        self._away[number] = _Away(number, microbatch, path, since_s, leg)
        return Send(Trip.begin(microbatch, leg, path, 1), slot, None)

    # --- losing -----------------------------------------------------------------------------------
    def _find(self, microbatch: Microbatch) -> _Away | None:
        return next((a for a in self._away.values() if a.microbatch == microbatch), None)

    def _lose(self, away: _Away) -> list[Command]:
        """It will not come back as it is (rules 3 and 4)."""
        is_fresh = away.leg is Leg.FORWARD and not away.turned
        if not is_fresh or away.attempt >= ATTEMPTS:
            return self._give_up(away)
        del self._away[away.number]
        self._present.again[away.number] = away
        self.counts[Counted.AGAIN] += 1
        return [TellLost(away.microbatch, away.path), Resend(away.number)]

    def _give_up(self, away: _Away) -> list[Command]:
        del self._away[away.number]
        gone: list[Command] = [Forget(away.number), TellLost(away.microbatch, away.path)]
        if away.leg is Leg.SCORE:
            return gone
        self.counts[Counted.LOST] += 1
        return [*gone, *self._end_one()]

    def _end_one(self) -> list[Command]:
        """One more microbatch has come to its end; after the last, relays may step (rule 1)."""
        self._present.left -= 1
        return self._announce(self.iteration + 1) if not self._present.left else []
