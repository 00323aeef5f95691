"""From a snapshot to moved slow weights: find a partner, exchange, take the outer step, count.

A snapshot is that of a closed round, or of a fragment that was sent. The outer state moves only
here, once per snapshot, under `lock` (state transfer reads under the same lock, so it reads one
state). A snapshot ends in `averaged` or `skipped(reason)` and is counted as one of them; without a
partner the n = 1 step is taken, and in the final averaging none.

A partner's vector is held against those of the partners before (protocol/plausible.py). One that is
too far away is not averaged with, and its peer rests; one that is further than usual pulls no more
than one at a little more than the usual distance; both bounds grow with the steps trained since a
partner last moved us. Before the first partner, our own last move stands for the usual distance;
later it is its lower bound. The final averaging uses the distances of the rounds before it. Honest
peers are within them, so the mean is exact; a peer that was alone for some rounds counts less.
Nothing is remembered there, because with each meeting peers are nearer to each other, and our own
move says nothing.

What is plausible is tried then: the step is taken, the trainer tells what its merge would do to our
loss, and if that does not help (protocol/gossip/helping.py) the partner is taken out of the step
again, and rests. Nothing is held against it, since of honest partners one in twenty does not help.
A state that is read meanwhile may hold the average: it is a plausible one. In the final averaging
nothing is tried: there all come to one mean, and a peer that left out another would stay apart.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Final

import blake3
import trio

from peer.facts import RoundTiming
from peer.observe.event_names import EventName
from peer.observe.events import Events
from peer.rounds.way import AveragingParts
from protocol.gossip.final_averaging import Meeting
from protocol.gossip.helping import Helpfulness
from protocol.gossip.matchmaking import MAX_EXCHANGE_ROUNDS, WAIT_ROUNDS, Patience
from protocol.membership.book import Fault
from protocol.outcomes import SkipReason
from protocol.plausible import Plausibility

from .exchange_session import Averaged, AverageEnded, OwnVector, Skipped
from .gossip import Gossip
from .outer_step import OuterState

MIN_SEARCH_S: Final = 2.0
MIN_EXCHANGE_S: Final = 30.0
FARTHEST_AT_FIRST: Final = 3.0
"""How far the first partners' vectors may be from ours, in lengths of ours. First weights are
short, and may double their length in the first hundred steps, so one who has trained is two lengths
from one who has just come; what it may pull is another matter (`expected`)."""
FARTHEST_WHOLE: Final = 1.5
"""The same where they count as much as we do, since nothing says what is usual. Two of one length
whose directions have nothing in common are sqrt(2) apart; ours and its opposite are 2."""
EXPECTED_AT_FIRST: Final = 2.0
"""How far the first partners' vectors are expected from ours, in lengths of our own last move: two
that went equally far from one place are at most two moves apart. Our own length is the most that is
expected, so that none of the first partners turns us round, however far we have moved."""

Trial = Callable[[OwnVector], Awaitable[float | None]]
"""What our loss gains by the step that was taken for this snapshot; None where nobody can tell."""


class PairLane:
    """Averages the snapshots of one fragment, or of a whole model."""

    def __init__(
        self,
        parts: AveragingParts,
        outer: OuterState,
        gossip: Gossip,
        events: Events,
        lock: trio.Lock,
    ) -> None:
        self.outer, self.gossip = outer, gossip
        self._inner_steps = parts.spec.sync.round_steps
        self._facts, self._work, self._events = parts.services.facts, parts.services.work, events
        self._observe_round = parts.observe_round
        self._patience = Patience()
        self._plausibility, self._helpfulness = Plausibility(), Helpfulness()
        self._lock = lock

    async def contribution(self, own: OwnVector) -> OwnVector:
        """The contribution of a snapshot that is of theta: with phi, where that travels too."""
        if not self.outer.needs_phi_codes:
            return own
        payload = await self._work.run(self.outer.with_phi, own.payload)
        digest = blake3.blake3(payload).hexdigest(length=16)
        return replace(own, payload=payload, digest=digest)

    async def average(
        self,
        own: OwnVector,
        meeting: Meeting | None,
        meanwhile: float,
        on_paired: Callable[[], None] | None = None,
    ) -> AverageEnded:
        """Find a partner for a snapshot and exchange vectors.

        Args:
            meeting: of the final averaging's plan; None for any peer that is free.
            meanwhile: nominal steps until the next snapshot is due; 0 if training waits.
            on_paired: called when a partner is found, but not for a planned meeting.
        """
        round_s = self._facts.round_s
        exchange_s = max(MIN_EXCHANGE_S, MAX_EXCHANGE_ROUNDS * round_s)
        # Nominal time until the next snapshot is due: search and exchange within it cost nothing.
        until_next_s = round_s * meanwhile / self._inner_steps
        if meeting is None:
            ended = await self.gossip.average(
                own,
                fresh_s=self._patience.for_fresh_s(until_next_s),
                search_s=max(MIN_SEARCH_S, WAIT_ROUNDS * round_s, self._facts.own_round_s),
                exchange_s=exchange_s,
                on_paired=on_paired,
            )
        else:
            ended = await self.gossip.meetings.meet(own, meeting, exchange_s)
        if isinstance(ended.outcome, Averaged):
            self._patience.exchanged(ended.match_s, ended.exchange_s, until_next_s)
        return ended

    async def apply(
        self, ended: AverageEnded, meeting: Meeting | None, train_s: float, trial: Trial
    ) -> float:
        """Take the outer step, have it tried, count how averaging ended. Returns the seconds."""
        started_s = trio.current_time()
        self._plausibility.trained(ended.own.steps)
        ended, share = await self._judged(ended, meeting)
        own, outcome = ended.own, ended.outcome
        partner = outcome.payload if isinstance(outcome, Averaged) else None
        own_share = 0.5 if meeting is None else meeting.own_share
        if share != 1.0:
            own_share = 1.0 - (1.0 - own_share) * share
        step = partial(self.outer.step, own.round, plain=own.final, own_share=own_share)
        async with self._lock:
            distance = await self._work.run(step, own.payload, partner)
        if meeting is None:
            ended = await self._helped(ended, own_share, trial)
        if distance is not None:
            self._facts.replica_distance = distance
            self._facts.pipeline.replicas_apart = self.outer.replicas_apart
        self._count(ended)
        apply_s = trio.current_time() - started_s
        self._observe_round(RoundTiming(train_s, ended.match_s, ended.exchange_s, apply_s))
        return apply_s

    async def _judged(
        self, ended: AverageEnded, meeting: Meeting | None
    ) -> tuple[AverageEnded, float]:
        """Hold the partner's vector against those before; how much it counts, 1 as ours."""
        own, outcome = ended.own, ended.outcome
        if not isinstance(outcome, Averaged):
            if outcome.reason is SkipReason.BAD_VECTOR and outcome.partner_id is not None:
                self.gossip.doubt(outcome.partner_id, Fault.BAD_VECTOR)
            return ended, 1.0
        distances = await self._work.run(self.outer.distances, own.payload, outcome.payload)
        moved = 0.0 if meeting else await self._moved(own.payload, distances.distance)
        expected = min(EXPECTED_AT_FIRST * moved, distances.own) or math.inf
        farthest = FARTHEST_AT_FIRST if moved else FARTHEST_WHOLE
        share = self._plausibility.share(
            outcome.partner_id,
            distances.distance,
            farthest * distances.own,
            expected=expected,
            least=moved,
            their_steps=outcome.steps,
            remember=not own.final,
            replaces_ours=meeting is not None and not meeting.own_share,
        )
        if share is not None:
            await self.gossip.packer.learn(own.payload, outcome.payload)
            return ended, share
        self.gossip.doubt(outcome.partner_id, Fault.IMPLAUSIBLE)
        return replace(ended, outcome=Skipped(SkipReason.IMPLAUSIBLE, outcome.partner_id)), 1.0

    async def _helped(self, ended: AverageEnded, own_share: float, trial: Trial) -> AverageEnded:
        """Take the partner out of the step if it did not help."""
        own, outcome = ended.own, ended.outcome
        if not isinstance(outcome, Averaged) or self.outer.needs_phi_codes:
            return ended
        gain = await trial(own)
        if gain is None or self._helpfulness.takes(outcome.partner_id, gain):
            return ended
        async with self._lock:
            await self._work.run(
                self.outer.without_partner, own.payload, outcome.payload, own_share
            )
        self._plausibility.not_taken(outcome.partner_id)
        self.gossip.doubt(outcome.partner_id, None)
        return replace(ended, outcome=Skipped(SkipReason.UNHELPFUL, outcome.partner_id))

    async def _moved(self, own_codes: memoryview, distance: float) -> float:
        """How far we have moved since the last outer step, where it matters at this distance."""
        if self._plausibility.is_usual(distance):
            return 0.0
        return await self._work.run(self.outer.distance_from_phi, own_codes)

    def _count(self, ended: AverageEnded) -> None:
        facts, own, outcome = self._facts, ended.own, ended.outcome
        if isinstance(outcome, Averaged):
            facts.count_averaged()
            if facts.replica_distance is not None:
                facts.distances.append((own.step, facts.replica_distance))
            facts.count_partner(outcome.partner_id, ended.exchange_s)
            self._events.emit(
                EventName.ROUND_AVERAGED,
                round=own.round,
                partner=outcome.partner_id,
                seconds=ended.exchange_s,
                searched_s=ended.match_s,
                distance=facts.replica_distance,
                step=own.step,
                age=facts.nominal_step - own.step,
            )
        else:
            facts.count_skipped(outcome.reason)
            self._events.emit(
                EventName.ROUND_SKIPPED,
                round=own.round,
                reason=outcome.reason,
                partner=outcome.partner_id,
                step=own.step,
            )
