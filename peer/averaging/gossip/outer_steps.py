"""From a snapshot to moved slow weights: find a partner, exchange, take the outer step, count.

The outer state moves only here, once per snapshot, under `lock` (state transfer reads under the
same lock, so what it reads is one state). A snapshot is that of a closed round, or of a fragment
that was sent. It ends in `averaged` or `skipped(reason)` and is counted as one of them; without a
partner the n = 1 step is taken, and in the final averaging none.

A partner's vector is held against those of the partners before (protocol/plausible.py). One that is
too far away is not averaged with; one that is further than usual pulls no more than one at a little
more than the usual distance; both go with the steps since the last average. Before there were any,
what we have moved ourselves says what is usual. In the final averaging that holds too, by the
distances of the rounds before it: those of honest peers are no longer, so their mean is exact,
unless one was alone for some rounds before; it counts less then. (Nothing is remembered there, for
with each meeting peers are nearer to each other, and what we have moved says nothing.) A partner
whose vector is implausible, or no vector at all, rests.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import blake3
import trio

from peer.facts import Facts, RoundTiming
from peer.observe.event_names import EventName
from peer.observe.events import Events
from peer.ports import Work
from protocol.gossip.final_averaging import Meeting
from protocol.gossip.patience import Patience
from protocol.membership.book import Fault
from protocol.outcomes import SkipReason
from protocol.plausible import Plausibility
from protocol.run.run_spec import RunSpec

from .exchange_io import OwnVector
from .exchanges import Averaged, RoundOutcome, Skipped, Timing
from .gossip import Bounds, Gossip
from .outer_state import OuterState

SEARCH_ROUNDS: Final = 2.0
"""A partner is looked for as long as so many rounds take, or one of our own where that is longer;
then the n = 1 step is taken."""
MIN_SEARCH_S: Final = 2.0
MAX_EXCHANGE_ROUNDS: Final = 8.0
"""An exchange may take as long as so many rounds. So an average is at most 10 rounds old (search
and exchange) when it is merged."""
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


@dataclass(frozen=True, slots=True)
class Settled:
    """What we brought to averaging, how that ended, and how long it took."""

    own: OwnVector
    outcome: RoundOutcome
    timing: Timing


class OuterSteps:
    """Takes the outer steps of one peer, or of one fragment.

    Args:
        lock: held while the outer state moves.

    Attributes:
        outer, gossip: as given.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        facts: Facts,
        outer: OuterState,
        gossip: Gossip,
        work: Work,
        events: Events,
        observe_round: Callable[[RoundTiming], None],
        lock: trio.Lock,
    ) -> None:
        self._spec = spec
        self._facts = facts
        self.outer = outer
        self.gossip = gossip
        self._work = work
        self._events = events
        self._observe_round = observe_round
        self._patience = Patience()
        self._plausibility = Plausibility()
        self._lock = lock
        self._steps_since_average = 0

    async def contribution(
        self, codes: memoryview, digest: str, *, round: int, step: int, steps: int, tokens: int
    ) -> OwnVector:
        """What a snapshot brings to averaging.

        Args:
            codes, digest: of theta.
            round: its number among ours.
            step: the nominal step at which it was taken.
            steps, tokens: trained since the one before.
        """
        payload, vectors = codes, 1
        if self.outer.needs_phi_codes:
            payload = await self._work.run(self._with_phi, codes)
            digest, vectors = blake3.blake3(payload).hexdigest(length=16), 2
        return OwnVector(
            round=round,
            step=step,
            final=self._facts.ended,
            steps=steps,
            tokens=tokens,
            codec=self._spec.sync.codec,
            vectors=vectors,
            digest=digest,
            payload=payload,
        )

    async def average(self, own: OwnVector, meeting: Meeting | None, meanwhile: float) -> Settled:
        """Find a partner for a snapshot and exchange vectors; its end is always a defined one.

        Args:
            meeting: of the final averaging's plan; None to average with whoever is free.
            meanwhile: nominal steps until the next snapshot is due; 0 if training waits.
        """
        round_s = self._facts.round_s
        exchange_s = max(MIN_EXCHANGE_S, MAX_EXCHANGE_ROUNDS * round_s)
        # For so long a partner may be awaited at no cost, exchange included.
        slack_s = round_s * meanwhile / self._spec.sync.round_steps
        if meeting is None:
            bounds = Bounds(
                fresh_s=self._patience.for_fresh_s(slack_s),
                search_s=max(MIN_SEARCH_S, SEARCH_ROUNDS * round_s, self._facts.own_round_s),
                exchange_s=exchange_s,
            )
            outcome, timing = await self.gossip.average(own, bounds)
        else:
            outcome, timing = await self.gossip.meet(own, meeting, exchange_s)
        if isinstance(outcome, Averaged):
            self._patience.exchanged(timing.match_s, timing.exchange_s, slack_s)
        return Settled(own, outcome, timing)

    async def take(self, settled: Settled, meeting: Meeting | None, train_s: float) -> None:
        """Take the outer step, and count how averaging ended.

        Args:
            train_s: what training took that the snapshot ended.
        """
        started_s = trio.current_time()
        self._steps_since_average += settled.own.steps
        settled, share = await self._judged(settled, meeting)
        if isinstance(settled.outcome, Averaged):
            self._steps_since_average = 0
        own, outcome = settled.own, settled.outcome
        partner = outcome.payload if isinstance(outcome, Averaged) else None
        theta, phi = _split(own.payload, own.vectors)
        their_theta, their_phi = _split(partner, own.vectors)
        assert theta is not None
        async with self._lock:
            step = partial(
                self.outer.step,
                plain=own.final,
                own_share=_own_share(meeting, share),
            )
            measures = await self._work.run(step, own.round, theta, their_theta, phi, their_phi)
        if measures.replica_distance is not None:
            self._facts.replica_distance = measures.replica_distance
            self._facts.pipeline.replicas_apart = self.outer.replicas_apart
        self._count(settled)
        apply_s, timing = trio.current_time() - started_s, settled.timing
        self._observe_round(RoundTiming(train_s, timing.match_s, timing.exchange_s, apply_s))

    async def _judged(self, settled: Settled, meeting: Meeting | None) -> tuple[Settled, float]:
        """Hold the partner's vector against what was seen; how much it counts, 1 as ours."""
        own, outcome = settled.own, settled.outcome
        if not isinstance(outcome, Averaged):
            if outcome.reason is SkipReason.BAD_VECTOR and outcome.partner_id is not None:
                self.gossip.doubt(outcome.partner_id, Fault.BAD_VECTOR)
            return settled, 1.0
        ours, theirs = _split(own.payload, own.vectors), _split(outcome.payload, own.vectors)
        assert ours[0] is not None
        assert theirs[0] is not None
        apart = await self._work.run(self.outer.apart, ours[0], theirs[0], ours[1], theirs[1])
        expected = math.inf if meeting else await self._expected(ours[0], apart.own)
        farthest = FARTHEST_AT_FIRST if math.isfinite(expected) else FARTHEST_WHOLE
        share = self._plausibility.share(
            outcome.partner_id,
            apart.distance,
            farthest * apart.own,
            expected=expected,
            own_steps=self._steps_since_average,
            their_steps=outcome.steps,
            remember=not own.final,
        )
        if share is not None:
            await self.gossip.believe(own, outcome.payload)
            return settled, share
        self.gossip.doubt(outcome.partner_id, Fault.IMPLAUSIBLE)
        return replace(settled, outcome=Skipped(SkipReason.IMPLAUSIBLE, outcome.partner_id)), 1.0

    async def _expected(self, own_codes: memoryview, own_length: float) -> float:
        """The distance that is usual while few partners were seen, if we have moved ourselves."""
        if self._plausibility.has_seen_enough:
            return math.inf
        moved = await self._work.run(self.outer.moved, own_codes)
        return min(EXPECTED_AT_FIRST * moved, own_length) or math.inf

    def _with_phi(self, codes: memoryview) -> memoryview:
        both = memoryview(bytearray(2 * len(codes)))
        both[: len(codes)] = codes
        self.outer.encode_phi(both[len(codes) :])
        return both

    def _count(self, settled: Settled) -> None:
        facts, timing = self._facts, settled.timing
        own, outcome = settled.own, settled.outcome
        if isinstance(outcome, Averaged):
            facts.count_averaged()
            self._events.emit(
                EventName.ROUND_AVERAGED,
                round=own.round,
                partner=outcome.partner_id,
                seconds=timing.exchange_s,
                searched_s=timing.match_s,
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


def _own_share(meeting: Meeting | None, share: float) -> float:
    """The weight of our weights in the mean with a partner that counts so much, 1 as any other."""
    own = 0.5 if meeting is None else meeting.own_share
    return own if share == 1.0 else 1.0 - (1.0 - own) * share


def _split(payload: memoryview | None, vectors: int) -> tuple[memoryview | None, memoryview | None]:
    """Codes of theta, and those of phi where they travel too."""
    if payload is None or vectors == 1:
        return payload, None
    half = len(payload) // vectors
    return payload[:half], payload[half:]
