"""NoLoCo, put together: whole models averaged by gossip in pairs.

Rounds of gossip: each closed round is averaged with one partner while the next one is trained.

    trainer   |---- round r ----|---- round r+1 ----------|----
    here                        | search, exchange, outer step, Apply |

- A round is opened when the one before is closed (overlap), or when that one is settled (without
  overlap, after the last round of training, and where there is nobody to average with: a peer alone
  waits for no line, and its training is then the same each time).
- A round is closed when its quota is done and the one before is settled; meanwhile it trains on
  (protocol/schedule/rounds.py). So at most one round is being settled.
- An exchange under way when the trainer dies is finished: its codes lie in memory that outlives the
  trainer.
- After the training: the final averaging (final_averaging.py).
- With `inner_steps = "auto"` a round is as long as `OwnLength` says, which also closes one that
  was begun alone when somebody comes. Validation goes by nominal rounds, which are as long for all.

The length of our own rounds, chosen by what averages take (protocol/gossip/round_length.py).

What an average took is known in two parts: the exchange and the outer step here, and the pause of
the trainer when that has merged it.

A peer alone has nobody's line to fill, so its rounds are nominal ones. But what a joiner takes is
our state after the last round, and a peer that trains finds us when a round ends. So a round that
was begun alone ends when a peer comes, and again when that begins to train: once each in a peer's
life, and not before it is as long as a first round among others, so that one that comes and goes,
or says it does, costs little.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import trio

from peer.averaging.parts import AveragingParts
from peer.codec import get_codec
from peer.facts import Facts, PeerState
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.ports import PeerId
from peer.rounds.loop import RoundLoop
from peer.rounds.pace import Pace
from peer.rounds.validation import Validation
from peer.rounds.way import TrainerLine
from peer.training.messages import Applied, Apply, Ready, RoundClosed, SyncEvent, TrainerProgress
from peer.training.ports import StartTrainer
from protocol.gossip.final_averaging import WAIT_ROUNDS
from protocol.gossip.round_length import FIRST_INNER_STEPS, RoundLength, TimedAverage
from protocol.membership.view import Member, View
from protocol.outcomes import SkipReason
from protocol.schedule.rounds import OwnRounds, RoundPlan, keep_together

from .exchanges import Averaged
from .final_averaging import FinalRounds
from .lane import GossipDoor, lane_of
from .outer_state import OuterState
from .outer_step import NolocoFactors
from .outer_steps import MAX_EXCHANGE_ROUNDS, OuterSteps, Settled

# --- own length -----------------------------------------------------------------------------------

COMPANY: Final = (PeerState.DOWNLOADING, PeerState.TRAINING)
"""States of those that want something of our next state: to begin with it, or to average with."""


class _Visit(NamedTuple):
    """A life of a peer, in a state in which it wants something of us."""

    peer_id: PeerId
    incarnation: int
    state: str


@dataclass(frozen=True, slots=True)
class _OnTheLine:
    """What is known of an average that the trainer has not merged."""

    round: int
    partner_id: PeerId
    line_s: float


class OwnLength:
    """Writes `facts.chosen_inner_steps`.

    Args:
        view: of those whom we average with.
    """

    def __init__(self, facts: Facts, events: EventLog, view: View) -> None:
        self._length = RoundLength()
        self._facts = facts
        self._events = events
        self._view = view
        self._steps = 0
        self._alone = False
        self._welcomed: frozenset[_Visit] = frozenset()
        self._nominal_step_s = 0.0
        self._last: _OnTheLine | None = None
        facts.chosen_inner_steps = self._length.inner_steps

    def next(self, nominal_step_s: float, *, alone: bool) -> int:
        """H of the round that begins now. Nobody's line is filled by a peer that is alone.

        Args:
            nominal_step_s: how long a nominal step takes us in it.
        """
        self._nominal_step_s = nominal_step_s
        self._steps = 0
        self._alone = alone
        if alone:
            self._welcomed = self._company() | self._still_there(self._welcomed)
        return self._facts.inner_steps_per_round if alone else self._length.inner_steps

    def progressed(self, steps: int) -> None:
        """The round in training is so far."""
        self._steps = steps

    @property
    def is_outgrown(self) -> bool:
        """Whether the round in training was begun alone, and somebody has come since."""
        if not self._alone or self._steps < FIRST_INNER_STEPS:
            return False
        return not self._company() <= self._welcomed

    def _company(self) -> frozenset[_Visit]:
        members = self._view.alive(trio.current_time())
        visits = (_Visit(m.peer_id, m.incarnation, m.progress.state) for m in members)
        return frozenset(visit for visit in visits if visit.state in COMPANY)

    def _still_there(self, visits: frozenset[_Visit]) -> frozenset[_Visit]:
        """Those of lives that may go on."""
        lives = {(member.peer_id, member.incarnation) for member in self._view.members()}
        return frozenset(v for v in visits if (v.peer_id, v.incarnation) in lives)

    def exchanged(self, round_: int, partner_id: PeerId, line_s: float) -> None:
        """This round's exchange and outer step are over, and took so long."""
        self._last = _OnTheLine(round_, partner_id, line_s)

    def merged(self, round_: int, pause_s: float) -> None:
        """The trainer has taken this round's average over, and stood still for so long."""
        last, self._last = self._last, None
        if last is None or last.round != round_ or not self._nominal_step_s:
            return
        before, length = self._length.inner_steps, self._length
        average = TimedAverage(last.partner_id, last.line_s, pause_s, self._nominal_step_s)
        if length.averaged(average):
            self._facts.chosen_inner_steps = length.inner_steps
            self._events.emit(
                EventName.ROUND_LENGTH_CHANGED,
                round=round_,
                inner_steps=length.inner_steps,
                before=before,
            )


# --- gossip rounds --------------------------------------------------------------------------------


class GossipRounds:
    """See the top of the file. Implements `peer.rounds.way.Way`.

    Args:
        own_length: None where the run says how long rounds are.
    """

    def __init__(
        self,
        rounds: OwnRounds,
        pace: Pace,
        *,
        facts: Facts,
        overlap: bool,
        outer: OuterState,
        steps: OuterSteps,
        finale: FinalRounds,
        validation: Validation,
        own_length: OwnLength | None = None,
    ) -> None:
        self._rounds = rounds
        self._pace = pace
        self._facts = facts
        self._overlap = overlap
        self._outer = outer
        self._steps = steps
        self._finale = finale
        self._validation = validation
        self._own_length = own_length
        self._validated_round: int | None = None
        self._line: TrainerLine | None = None
        self._settled = trio.Event()
        self._settled.set()

    @property
    def version(self) -> int:
        """Version of the slow weights."""
        return self._outer.version

    # --- which rounds are trained -----------------------------------------------------------------
    def enter(self, others: Sequence[Member]) -> None:
        """Go on where the others are, if they are ahead."""
        self._rounds.enter([m.progress.step for m in others])

    def next_round(self, others: Sequence[Member]) -> RoundPlan | None:
        """The next round of training; None when the training is over."""
        if self._rounds.is_over:
            return None
        rounds, pace = self._rounds, self._pace
        if self._own_length is not None:
            rounds.length = self._own_length.next(pace.nominal_step_s(others), alone=not others)
        return rounds.plan(pace.owed(rounds.step, others, keep_together, rounds.length))

    def closes_early(self, others: Sequence[Member]) -> bool:
        """Whether somebody has come since we began a round alone; one that is behind jumps."""
        return self._own_length is not None and self._own_length.is_outgrown

    async def next_final_round(self) -> RoundPlan | None:
        """The next round of the final averaging."""
        assert self._line is not None
        if not await self._finale.goes_on(self._line):
            return None
        return self._rounds.plan(1.0)

    # --- what happens to them ---------------------------------------------------------------------
    def began(self, line: TrainerLine, ready: Ready) -> None:
        """A trainer has started."""
        self._line = line

    def progressed(self, progress: TrainerProgress) -> None:
        """Note it, where lengths of rounds are ours."""
        if self._own_length is not None:
            self._own_length.progressed(progress.steps)

    async def closed(self, closed: RoundClosed, others: Sequence[Member]) -> None:
        """Average a closed round; the next one may begin at once if averaging overlaps."""
        await self._settled.wait()  # it is: no round is closed before the last is applied
        self._settled = trio.Event()
        self._rounds.closed(closed.step, [m.progress.step for m in others])
        self._facts.debt = self._rounds.debt
        line = self._line
        assert line is not None
        line.nursery.start_soon(self._settle, line, closed)
        if not self._overlap or self._rounds.is_over or not others:
            await self._settled.wait()

    async def took(self, event: SyncEvent) -> None:
        """Note what a merge took, where that matters."""
        if isinstance(event, Applied) and self._own_length is not None:
            self._own_length.merged(event.round, event.pause_s)

    async def died(self) -> None:
        """An exchange under way needs no trainer: let it end."""
        await self._settled.wait()
        self._line = None

    def leave(self) -> None:
        """Nothing to do: an exchange begins with a round, or with a fragment, that ends."""

    async def wait_settled(self) -> None:
        """Wait until no exchange is under way."""
        await self._settled.wait()

    # --- settling a closed round ------------------------------------------------------------------
    async def _settle(self, line: TrainerLine, closed: RoundClosed) -> None:
        """Average a closed round, take the outer step, and tell the trainer."""
        meeting, step = self._finale.meeting, int(self._rounds.step)
        meanwhile = self._rounds.next_length if self._overlap else 0.0
        try:
            assert closed.slot is not None
            assert closed.digest is not None
            own = await self._steps.contribution(
                line.trainer.codes(closed.slot),
                closed.digest,
                round=closed.round,
                step=step,
                steps=closed.steps,
                tokens=closed.tokens,
            )
            settled = await self._steps.average(own, meeting, meanwhile)
            await self._validation.wait_idle()  # the slow weights lie still meanwhile
            started_s = trio.current_time()
            await self._steps.take(settled, meeting, closed.seconds)
            self._note(settled, trio.current_time() - started_s)
            await line.send(Apply(closed.round))
            if not self._finale.has_begun and self._is_validation_due(closed.round):
                await self._validation.begin(line, closed.round)
        finally:
            self._settled.set()

    def _note(self, settled: Settled, apply_s: float) -> None:
        """Tell how long the line was busy, unless that says nothing of it."""
        own, outcome, line_s = settled.own, settled.outcome, settled.timing.exchange_s + apply_s
        if self._own_length is None or own.final or outcome.partner_id is None:
            return
        if isinstance(outcome, Averaged) or outcome.reason is SkipReason.DEADLINE:
            self._own_length.exchanged(own.round, outcome.partner_id, line_s)

    def _is_validation_due(self, round_: int) -> bool:
        if self._own_length is None:
            return self._validation.is_due(round_)
        nominal = self._rounds.nominal_round
        is_due = self._validation.is_due(nominal, self._validated_round)
        if is_due or self._validated_round is None:
            self._validated_round = nominal
        return is_due


# --- the way, put together ------------------------------------------------------------------------


class PairAveraging:
    """NoLoCo with the factors of the run spec. Implements `peer.averaging.parts.Averaging`."""

    def __init__(self, parts: AveragingParts) -> None:
        held, sync = parts.held, parts.spec.sync
        self._parts = parts
        # Not zeros_like, which writes them: memory that is never written is none.
        momentum_P = np.zeros(parts.slow_P.size, np.float32)
        factors = NolocoFactors(sync.alpha, sync.beta, sync.effective_gamma)
        self._outer = OuterState(parts.slow_P, momentum_P, get_codec(held.codec), factors)
        self.lock = trio.Lock()
        self._lane = lane_of(
            parts,
            self._outer,
            group=held.group.digest,
            layout_digest=held.shape.layout_digest,
            size=held.shape.padded_parameters,
            company=parts.company_of(0),
            events=parts.events,
            lock=self.lock,
        )
        self._door = GossipDoor(parts.network, [self._lane.gossip])
        self.slow_P, self.momentum_P = parts.slow_P, momentum_P

    @property
    def round(self) -> int:
        """The round of the last outer step; -1 before the first."""
        return self._outer.round

    @property
    def senders(self) -> int:
        """A partner."""
        return 1

    def stands_after(self, round_: int) -> None:
        """The vectors hold our first state, as it stood after this round; -1 before the first."""
        self._outer.stands_after(round_)

    def begin(self, start_trainer: StartTrainer) -> RoundLoop:
        """The rounds."""
        parts, validation = self._parts, self._parts.validation()
        sync, facts = parts.spec.sync, parts.facts
        chooses = sync.inner_steps == "auto"
        finale = FinalRounds(
            wanted=sync.final_averaging,
            facts=facts,
            view=parts.held.view,
            company=parts.company_of(0),
            held=self._lane.meetings,
            validation=validation,
            events=parts.events,
            wait_rounds=MAX_EXCHANGE_ROUNDS if chooses else WAIT_ROUNDS,
        )
        way = GossipRounds(
            OwnRounds(
                facts.peer_id,
                sync.round_steps,
                parts.amended.total_steps_at,
                facts.round,
                facts.nominal_step,
                debt=facts.debt,
            ),
            Pace(sync.round_steps, facts),
            facts=facts,
            overlap=sync.overlap,
            outer=self._outer,
            steps=self._lane.steps,
            finale=finale,
            validation=validation,
            own_length=OwnLength(facts, parts.events, parts.held.view) if chooses else None,
        )
        return parts.loop(way, validation, start_trainer)

    async def serve(self) -> None:
        """Answer proposals until cancelled."""
        await self._door.run()
