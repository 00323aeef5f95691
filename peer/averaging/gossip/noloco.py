"""NoLoCo, put together: a model averaged by gossip in pairs, whole or in fragments.

Idea. The whole model is averaged at the close of a round with one partner, while the next round is
trained; then the line carries everything at once and then nothing. Or the model is cut into
fragments. Each leaves at its own moment of the round, finds a partner of its own, and comes back
when its exchange is over: nothing on the line comes in bursts, and averages are younger.

    delta[p] <- alpha delta[p] + beta (mean theta[p] - phi[p])        of fragment p and its pair
    phi[p]   <- phi[p] + delta[p]
    theta[p] <- theta[p] + (phi[p] - own snapshot, as its codes say)

A whole model is one fragment, and may have gamma != beta (outer_step.py); codes of phi would double
what a fragment weighs. The trainer merges as a difference, so an average may come late without harm
(LOSCAR-SGD, arXiv 2605.20866; the moments of fragments are Streaming DiLoCo's, arXiv 2501.18512).

    trainer      |---- round r ----|---- round r+1 ----------|            whole
    here                           send | search, exchange, step | merge

    trainer      |------ round r ------|------ round r+1 ------| ...      in fragments
    fragment 0   send |-- search, exchange, step --| merge         send |-- ...
    fragment 1              send |-- search, exchange, step --| merge        send |-- ...

- What the trainer sends (peer/training/sync.py) begins an *average*: contribution, exchange,
  outer step, `Merge`. Each fragment has a *lane* (lane.py), with one average on it at a time. Lanes
  share the memory of slow weights and momentum, and nothing else.
- A round of a whole model is closed when its quota is done and the average of the one before has
  ended; meanwhile it trains on (protocol/schedule/rounds.py). The next one is opened when it is
  closed. After the last round, without overlap, or alone, it is opened when that average has ended:
  a peer alone waits for no line, and its training is then the same each time.
- With fragments, rounds pace data and schedule alone: one is closed when its quota is done.
- Slow weights are written by one average at a time, and by none while they are validated.
- A step with a partner is tried by the trainer before it is merged (lane.py), where a try is cheap
  enough. Without a trainer it is not.
- An average under way when the trainer dies is ended without a merge, because the next life loads
  the slow weights. Its codes lie in memory that outlives the trainer.
- After the training every average ends. Then come rounds of no steps, in which the trainer sends
  all that it has, for the meetings of the final averaging (final_rounds.py): all fragments meet the
  same partner, a few at a time. Without final averaging, fragments have one such round, with
  partners as in training, for what was trained since their last moments.
- With `inner_steps = "auto"` a round is of our own length (own_length.py). Validation counts
  nominal rounds, which are as long for all.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import trio

from peer.codec import get_codec
from peer.facts import PeerState
from peer.observe.events import Events, NamedEvents
from peer.rounds.loop import RoundLoop
from peer.rounds.pace import Pace
from peer.rounds.validation import Validation
from peer.rounds.way import AveragingParts, TrainerLine
from peer.training.messages import Ready, RoundClosed, SyncEvent
from peer.training.ports import StartTrainer
from protocol.fragment.fragments import Fragment, fragment_layout_digest, fragments_of_run
from protocol.gossip.helping import trial_blocks
from protocol.limits import MAX_STRIPES
from protocol.membership.group import Group
from protocol.membership.view import Member
from protocol.outcomes import RefusalReason
from protocol.run.layout import Layout
from protocol.schedule.rounds import OwnRounds, RoundPlan, keep_together
from protocol.trainer_messages import ONE_CHUNK, FragmentMerged, FragmentSent, Merge, Tried, Try

from .exchange_session import OwnVector
from .exchanges import Agreement
from .final_rounds import FinalMeetings, FinalRounds
from .gossip import Gossip, GossipServer
from .lane import PairLane
from .outer_step import NolocoFactors, OuterState
from .own_length import OwnLength

# --- rounds ---------------------------------------------------------------------------------------

MEETINGS_AT_ONCE: Final = 4
"""Fragments that hold a planned meeting at once: each waits for the one this many before it.
Both sides keep to that order, so neither waits for what the other has not come to."""


class PairRounds:
    """The rounds of a peer that averages in pairs. Implements `peer.rounds.way.Way`."""

    def __init__(
        self, parts: AveragingParts, averaging: "PairAveraging", validation: Validation
    ) -> None:
        self._spec, facts, sync = parts.spec, parts.services.facts, parts.spec.sync
        chooses = sync.inner_steps == "auto"
        self._rounds = OwnRounds(
            facts.peer_id,
            sync.round_steps,
            parts.amended.total_steps_at,
            facts.round,
            facts.nominal_step,
            debt=facts.debt,
        )
        self._pace = Pace(sync.round_steps, facts)
        self._own_length = OwnLength(parts.services, parts.held.view) if chooses else None
        self._finale = FinalRounds(parts, validation, waits_for_exchanges=chooses)
        self._is_whole, self._overlap = sync.pairs.is_whole, sync.overlap
        self._flush_is_due = not (sync.final_averaging or self._is_whole)
        self._facts = facts
        self._averaging = averaging
        self._validation = validation
        self._validated_round: int | None = None
        self._line: TrainerLine | None = None
        self._at_rest = trio.Lock()
        self._sent: FragmentSent | None = None
        self._sent_s: dict[int, float] = {}
        self._measures = False
        self._trials: dict[int, trio.MemorySendChannel[float | None]] = {}
        self._exchanged: dict[int, trio.Event] = {}
        self._idle = trio.Event()
        self._idle.set()
        self._is_leaving = False
        self.averages_under_way = 0

    # --- which rounds are trained -----------------------------------------------------------------
    def enter(self, others: Sequence[Member]) -> None:
        self._rounds.enter([m.progress.step for m in others])

    def next_round(self, others: Sequence[Member]) -> RoundPlan | None:
        if self._rounds.is_over:
            return None
        rounds, pace = self._rounds, self._pace
        if self._own_length is not None:
            rounds.length = self._own_length.next(pace.nominal_step_s(others), alone=not others)
        return rounds.plan(pace.owed(rounds.step, others, keep_together, rounds.length))

    def closes_early(self, steps: int, others: Sequence[Member]) -> bool:
        """Whether a peer has come since we began a round alone, or the round is far too long."""
        heard_steps, step = [m.progress.step for m in others], self._facts.nominal_step
        is_outgrown = self._own_length is not None and self._own_length.is_outgrown(steps)
        is_too_long = self._pace.is_overdone(others) or self._rounds.would_jump(step, heard_steps)
        return is_outgrown or is_too_long

    async def next_final_round(self) -> RoundPlan | None:
        assert self._line is not None
        await self._idle.wait()
        if self._flush_is_due:
            self._flush_is_due = False
        elif not await self._finale.goes_on(self._line, self._averaging.meetings):
            return None
        return self._rounds.plan(1.0)

    # --- what happens to them ---------------------------------------------------------------------
    def on_trainer_started(self, line: TrainerLine, ready: Ready) -> None:
        self._line, self._sent, self._measures = line, None, ready.measures
        if not self._averaging.lanes:
            self._averaging.cut(Layout.from_shapes(dict(ready.shapes)))
        self._sent_s = dict.fromkeys(range(len(self._averaging.lanes)), trio.current_time())

    def on_progress(self) -> None:
        pass

    async def on_round_closed(self, closed: RoundClosed, others: Sequence[Member]) -> None:
        """A whole model leaves now. The next round waits for it without overlap, and alone."""
        assert self._line is not None
        self._rounds.closed(closed.step, [m.progress.step for m in others])
        self._facts.debt = self._rounds.debt
        waits = self._rounds.is_over
        if self._is_whole:
            assert self._sent is not None
            self._start_averaging(self._line, self._sent, closed)
            waits = waits or not self._overlap or not others
        elif not waits:
            self._line.nursery.start_soon(self._validate, self._line, closed.round)
        if waits:
            await self._idle.wait()

    async def on_event(self, event: SyncEvent) -> None:
        """A fragment was sent, or merged; a whole model leaves when its round is closed."""
        assert self._line is not None
        if isinstance(event, FragmentSent):
            self._sent = event
            if not self._is_whole:
                self._start_averaging(self._line, event)
        elif isinstance(event, Tried):
            self._tried(event.fragment, event.gain)
        elif isinstance(event, FragmentMerged) and self._own_length is not None:
            self._own_length.merged(event.waited_s)

    async def on_trainer_died(self) -> None:
        """Let averages under way end: they need no trainer."""
        self._measures = False
        for fragment in list(self._trials):
            self._tried(fragment, None)
        await self._idle.wait()
        self._line = None

    def leave(self) -> None:
        self._is_leaving = True

    async def wait_idle(self) -> None:
        await self._idle.wait()

    # --- averages under way -----------------------------------------------------------------------
    def _start_averaging(
        self, line: TrainerLine, sent: FragmentSent, closed: RoundClosed | None = None
    ) -> None:
        """Begin the average of a fragment, or of a whole model with the round that it closes."""
        if self._is_leaving:
            return
        self.averages_under_way += 1
        if self._idle.is_set():
            self._idle = trio.Event()
        before = self._exchanged.get(sent.fragment - MEETINGS_AT_ONCE)
        self._exchanged[sent.fragment] = trio.Event()
        line.nursery.start_soon(self._average, line, sent, closed, before)

    async def _average(
        self,
        line: TrainerLine,
        sent: FragmentSent,
        closed: RoundClosed | None,
        before: trio.Event | None,
    ) -> None:
        """Average what was sent, and merge; a planned meeting begins when `before` is set."""
        lane, exchanged = self._averaging.lanes[sent.fragment], self._exchanged[sent.fragment]
        meeting, now_s = self._finale.meeting, trio.current_time()
        since_s, self._sent_s[sent.fragment] = now_s - self._sent_s[sent.fragment], now_s
        train_s, own_length = closed.seconds if closed else since_s, self._own_length
        on_paired = own_length.paired if own_length is not None else None
        try:
            own = await lane.contribution(self._own_vector(line, sent, closed))
            if meeting is not None and before is not None:
                await before.wait()
            meanwhile = self._rounds.next_length if self._overlap else 0.0
            ended = await lane.average(own, meeting, meanwhile, on_paired)
            exchanged.set()
            trial = partial(self._try, line, sent)
            async with self._at_rest:
                await self._validation.wait_idle()
                apply_s = await lane.apply(ended, meeting, train_s, trial)
            if own_length is not None and closed is not None:
                own_length.exchanged(ended, apply_s, closed)
            await line.send(Merge(sent.fragment, sent.cycle, ONE_CHUNK, ()))
            if closed and not self._finale.has_begun and self._is_validation_due(closed.round):
                await self._validation.begin_next(line, closed.round)
        finally:
            exchanged.set()
            self.averages_under_way -= 1
            if not self.averages_under_way:
                self._idle.set()

    def _own_vector(
        self, line: TrainerLine, sent: FragmentSent, closed: RoundClosed | None
    ) -> OwnVector:
        lane, codes = self._averaging.lanes[sent.fragment], line.trainer.codes(sent.fragment)
        round_ = closed.round if closed else lane.outer.round + 1
        step, is_final = self._rounds.step if closed else sent.step, self._facts.training_averaged
        return OwnVector(
            round=round_,
            step=int(step),
            final=is_final,
            steps=sent.steps,
            tokens=sent.tokens,
            digest=sent.digest,
            payload=codes,
        )

    async def _try(self, line: TrainerLine, sent: FragmentSent, own: OwnVector) -> float | None:
        """Ask the trainer what a merge would gain, if it is worth the time."""
        if not self._measures:
            return None
        batch_size, lanes = self._spec.training.batch_size, len(self._averaging.lanes)
        blocks = trial_blocks(own.steps, batch_size, self._spec.model.context_length, lanes)
        if not blocks:
            return None
        self._trials[sent.fragment], gain = trio.open_memory_channel[float | None](1)
        await line.send(Try(sent.fragment, sent.cycle, blocks))
        return await gain.receive()

    def _tried(self, fragment: int, gain: float | None) -> None:
        if (trial := self._trials.pop(fragment, None)) is not None:
            trial.send_nowait(gain)

    async def _validate(self, line: TrainerLine, round_: int) -> None:
        async with self._at_rest:
            if self._is_validation_due(round_):
                await self._validation.begin_next(line, round_)

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
    """Implements `peer.averaging.parts.Averaging`. Fragments get lanes with the first trainer."""

    def __init__(self, parts: AveragingParts) -> None:
        self._parts = parts
        self._is_whole = parts.spec.sync.pairs.is_whole
        # Not zeros_like, which writes them: memory that is never written is none.
        self.slow_P, self.momentum_P = parts.slow_P, np.zeros(parts.slow_P.size, np.float32)
        self.lock = trio.Lock()
        self.lanes: list[PairLane] = []
        self._is_cut = trio.Event()
        self._first_round = -1
        self._rounds: PairRounds | None = None
        if self._is_whole:
            self._fill([Fragment(0, ((0, parts.slow_P.size),), ())])

    @property
    def round(self) -> int:
        """The round of the last outer step; with fragments, which step in rounds, the last over."""
        if self._is_whole:
            return self.lanes[0].outer.round
        return self._parts.services.facts.round_over

    @property
    def senders(self) -> int:
        return max(1, self._rounds.averages_under_way) if self._rounds else 1

    def set_first_round(self, round_: int) -> None:
        self._first_round = round_
        for lane in self.lanes:
            lane.outer.set_first_round(round_)

    def begin(self, start_trainer: StartTrainer) -> RoundLoop:
        parts = self._parts
        validation = Validation(parts.spec.sync.validate_every, parts.services, parts.domains)
        self._rounds = PairRounds(parts, self, validation)
        return RoundLoop(parts, self._rounds, validation, start_trainer)

    async def serve(self) -> None:
        """Look for partners and answer proposals until cancelled, once the fragments are known."""
        await self._is_cut.wait()
        await GossipServer(self._parts.services.network, [lane.gossip for lane in self.lanes]).run()

    @property
    def meetings(self) -> list[FinalMeetings]:
        return [lane.gossip.meetings for lane in self.lanes]

    def cut(self, layout: Layout) -> None:
        self._fill(fragments_of_run(self._parts.spec.sync.pairs, layout))

    def _fill(self, fragments: Sequence[Fragment]) -> None:
        for fragment in fragments:
            lane = self._lane(fragment, len(fragments))
            lane.outer.set_first_round(self._first_round)
            self.lanes.append(lane)
        self._is_cut.set()

    def _lane(self, fragment: Fragment, num_fragments: int) -> PairLane:
        """A fragment is averaged by a group of its own."""
        parts, held, sync = self._parts, self._parts.held, self._parts.spec.sync
        outer = OuterState(
            parts.slow_P,
            self.momentum_P,
            get_codec(held.codec, part_of=held.shape.padded_parameters),
            NolocoFactors(sync.alpha, sync.beta, sync.effective_gamma),
            fragment.spans,
        )
        group, layout_digest = held.group.digest, held.shape.layout_digest
        events: Events = parts.services.events
        if not self._is_whole:
            group = Group(held.group.run_id, f"fragment/{fragment.index}").digest
            layout_digest = fragment_layout_digest(layout_digest, fragment)
            events = NamedEvents(events, fragment=fragment.index)
        agreement = Agreement(
            group=group,
            inner_steps=sync.round_steps,
            layout_digest=layout_digest,
            codec=held.codec,
            vectors=2 if outer.needs_phi_codes else 1,
            padded_parameters=fragment.size,
            declined_now=lambda: declined_in(parts.services.facts.state),
            # Streams are bounded for each remote peer, and all fragments may have the same partner.
            max_stripes=max(0, MAX_STRIPES // num_fragments - (num_fragments > 1)),
        )
        gossip = Gossip(
            agreement,
            parts.services.network,
            parts.services.work,
            candidates=parts.candidates_of(fragment.index),
            events=events,
            refused=parts.services.facts.refused,
            packing=parts.services.facts.packing,
        )
        return PairLane(parts, outer, gossip, events, self.lock)


def declined_in(state: PeerState) -> RefusalReason | None:
    if state is PeerState.LEAVING:
        return RefusalReason.LEAVING
    return None if state is PeerState.TRAINING else RefusalReason.NOT_TRAINING
