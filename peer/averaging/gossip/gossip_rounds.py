"""Rounds of gossip: each closed round is averaged with one partner while the next one is trained.

    trainer   |---- round r ----|---- round r+1 ----------|----
    here                        | search, exchange, outer step, Apply |

- A round is opened when the one before is closed (overlap), or when that one is settled (without
  overlap, after the last round of training, and where there is nobody to average with: a peer alone
  waits for no line, and its training is then the same each time).
- A round is closed when its quota is done and the one before is settled; meanwhile it trains on
  (protocol/schedule/own_rounds.py). So at most one round is being settled.
- An exchange under way when the trainer dies is finished: its codes lie in memory that outlives the
  trainer.
- After the training: the final averaging (final_rounds.py).
- With `inner_steps = "auto"` a round is as long as own_length.py says, which also closes one that
  was begun alone when somebody comes. Validation goes by nominal rounds, which are as long for all.
"""

from collections.abc import Sequence

import trio

from peer.averaging.gossip.outer_state import OuterState
from peer.observe.facts import Facts
from peer.rounds.pace import Pace
from peer.rounds.validation import Validation
from peer.rounds.way import TrainerLine
from peer.training.messages import Applied, Apply, Progress, Ready, RoundClosed, SyncEvent
from protocol.membership.view import Member
from protocol.outcomes import SkipReason
from protocol.schedule.own_rounds import OwnRounds, RoundPlan
from protocol.schedule.rounds import keep_together

from .final_rounds import FinalRounds
from .outcome import Averaged
from .outer_steps import OuterSteps, Settled
from .own_length import OwnLength


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

    def progressed(self, progress: Progress) -> None:
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
