"""From a closed round to moved slow weights: find a partner, exchange, take the outer step, count.

The outer state moves only here, once per round, under `lock` (state transfer reads under the same
lock, so what it reads is one state). A round ends in `averaged` or `skipped(reason)` and is counted
as one of them; without a partner the n = 1 step is taken.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import blake3
import trio

from peer.averaging.exchange_io import Contribution
from peer.averaging.gossip import Gossip
from peer.averaging.outcome import Averaged, Outcome, Skipped
from peer.averaging.outer_state import Factors, OuterState
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.ports import Work
from peer.training.messages import RoundClosed
from peer.training.ports import Trainer
from protocol.deadline import ObservedDeadline
from protocol.outcomes import SkipReason
from protocol.run_spec import RunSpec
from protocol.view import View

from .facts import Facts

MIN_SEARCH_S: Final = 1.0
MAX_SEARCH_S: Final = 30.0
MIN_EXCHANGE_S: Final = 30.0
"""An exchange may take this long, or as long as a round if that is longer."""
CONSENSUS: Final = Factors(alpha=0.0, beta=1.0, gamma=1.0)
"""The final rounds train no more: both sides take the mean of their weights."""


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """Seconds that one round spent in each phase."""

    train_s: float
    match_s: float
    exchange_s: float
    apply_s: float


@dataclass(frozen=True, slots=True)
class Averaging:
    """A closed round with what we brought to it and how averaging ended."""

    own: Contribution
    closed: RoundClosed
    outcome: Outcome


class OuterSteps:
    """Takes the outer steps of one peer.

    Attributes:
        lock: held while the outer state moves.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        facts: Facts,
        view: View,
        outer: OuterState,
        gossip: Gossip,
        work: Work,
        events: EventLog,
        observe_round: Callable[[RoundTiming], None],
    ) -> None:
        self._spec = spec
        self._facts = facts
        self._view = view
        self._outer = outer
        self._gossip = gossip
        self._work = work
        self._events = events
        self._observe_round = observe_round
        self._search = ObservedDeadline(floor_s=MIN_SEARCH_S, ceiling_s=MAX_SEARCH_S)
        self.lock = trio.Lock()

    def __repr__(self) -> str:
        return f"<OuterSteps {self._outer!r}, search {self._search!r}>"

    async def average(self, trainer: Trainer, closed: RoundClosed, *, jumped: bool) -> Averaging:
        """Find a partner for a closed round and exchange vectors; its end is always a defined one.

        Args:
            jumped: the round was given up for a newer one, so there is nobody to ask.
        """
        own = await self._work.run(self._contribution, trainer, closed)
        outcome = Skipped(SkipReason.JUMPED) if jumped else await self._search_partner(own, closed)
        return Averaging(own, closed, outcome)

    async def take(self, averaging: Averaging) -> None:
        """Take the outer step, and count how the round ended."""
        started_s = trio.current_time()
        own, outcome = averaging.own, averaging.outcome
        partner = outcome.payload if isinstance(outcome, Averaged) else None
        theta, phi = _split(own.payload, own.vectors)
        their_theta, their_phi = _split(partner, own.vectors)
        assert theta is not None
        factors = CONSENSUS if own.round >= self._spec.total_rounds else None
        async with self.lock:
            measures = await self._work.run(
                self._outer.step, own.round, theta, their_theta, phi, their_phi, factors
            )
        if measures.replica_distance is not None:
            self._facts.replica_distance = measures.replica_distance
        self._count(averaging.closed, outcome, trio.current_time() - started_s)

    async def _search_partner(self, own: Contribution, closed: RoundClosed) -> Outcome:
        candidates = [m.peer_id for m in self._view.members_training(trio.current_time())]
        outcome = await self._gossip.average(
            own,
            candidates,
            search_s=self._search_s(closed),
            exchange_s=max(MIN_EXCHANGE_S, closed.seconds),
        )
        if isinstance(outcome, Averaged):
            self._search.observe(self._gossip.last_timing.match_s)
        return outcome

    def _search_s(self, closed: RoundClosed) -> float:
        """How long to look for a partner.

        Half a round costs nothing while the next one is trained; who learnt from quick matches to
        give up early would never get through to the last free peer of a large group. Where training
        waits, what was observed bounds it. In a final round nothing is left to be late for.
        """
        half_round_s = max(MIN_SEARCH_S, closed.seconds / 2)
        if closed.round >= self._spec.total_rounds:
            return MAX_SEARCH_S
        if self._spec.sync.overlap:
            return half_round_s
        return min(self._search.current_s, half_round_s)

    def _contribution(self, trainer: Trainer, closed: RoundClosed) -> Contribution:
        assert closed.slot is not None
        assert closed.digest is not None
        payload, digest, vectors = trainer.codes(closed.slot), closed.digest, 1
        if self._outer.needs_phi_codes:
            both = memoryview(bytearray(2 * len(payload)))
            both[: len(payload)] = payload
            self._outer.encode_phi(both[len(payload) :])
            payload = both
            digest, vectors = blake3.blake3(payload).hexdigest(length=16), 2
        return Contribution(
            round=closed.round,
            steps=closed.steps,
            tokens=closed.tokens,
            codec=self._spec.sync.codec,
            vectors=vectors,
            digest=digest,
            payload=payload,
        )

    def _count(self, closed: RoundClosed, outcome: Outcome, apply_s: float) -> None:
        facts, timing = self._facts, self._gossip.last_timing
        if isinstance(outcome, Averaged):
            facts.averaged += 1
            self._events.emit(
                EventName.ROUND_AVERAGED,
                round=closed.round,
                partner=outcome.partner_id,
                seconds=timing.exchange_s,
                distance=facts.replica_distance,
            )
        else:
            facts.skipped[outcome.reason] += 1
            self._events.emit(
                EventName.ROUND_SKIPPED,
                round=closed.round,
                reason=outcome.reason,
                partner=outcome.partner_id,
            )
        self._observe_round(RoundTiming(closed.seconds, timing.match_s, timing.exchange_s, apply_s))


def _split(payload: memoryview | None, vectors: int) -> tuple[memoryview | None, memoryview | None]:
    """Codes of theta, and those of phi where they travel too."""
    if payload is None or vectors == 1:
        return payload, None
    half = len(payload) // vectors
    return payload[:half], payload[half:]
