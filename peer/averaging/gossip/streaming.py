"""Streaming gossip, put together: NoLoCo's outer step for each fragment, and their rounds.

Idea. NoLoCo averages the whole model at the close of a round, so the line carries everything at
once and then nothing. Here the model is cut into fragments. Each leaves at its own moment of the
round, finds a partner of its own, and comes back when its exchange is over, after a fraction of a
round: nothing on the line comes in bursts, and averages are younger. The trainer merges it as a
difference, so it may come late without harm.

    delta[p] <- alpha delta[p] + beta (mean theta[p] - phi[p])        of fragment p and its pair
    phi[p]   <- phi[p] + delta[p]
    theta[p] <- theta[p] + (phi[p] - own snapshot, as its codes say)

The outer step is NoLoCo's with gamma = beta (peer/averaging/gossip/outer_step.py): codes of phi
would double what a fragment weighs. The merge is LOSCAR-SGD's (arXiv 2605.20866), the moments are
Streaming DiLoCo's (arXiv 2501.18512).

Rounds of streaming gossip: they pace data and schedule; fragments are averaged beside them.

    trainer      |------ round r ------|------ round r+1 ------| ...       never stands still
    fragment 0   send |-- search, exchange, step --| merge         send |-- ...
    fragment 1              send |-- search, exchange, step --| merge        send |-- ...

- A round is H nominal steps of this peer. It is closed when its quota is done, and the next one is
  opened at once, whatever is under way.
- The trainer sends each fragment at its moment (peer/training/streaming_gossip.py). That is the
  fragment's *flight*: contribution, average with a partner of its own, outer step, `Merge`. Flights
  of different fragments know nothing of each other; a fragment has one at a time.
- Slow weights are written by one flight at a time, and by none while they are validated.
- A flight under way when the trainer dies is ended without a merge, for the next life loads the
  slow weights. Its codes lie in memory that outlives the trainer.
- After the training every flight ends. Then come rounds of no steps, in which the trainer sends all
  fragments: the meetings of the final averaging (final_averaging.py), where all fragments meet
  the same partner, a few at a time. A run without them has one such round, with partners as in
  training, for what was trained since the last moments.

The fragments of one peer, each averaged in pairs by a group of its own.

Everything that a vector has in gossip (lane.py) each fragment has for itself:
so each finds its own partner, and while one is looked for or exchanged, others are too. What they
share is the memory of slow weights and momentum, the lock under which these move, and the door.

Streams are bounded for each remote peer (peer/network/handlers.py), and all fragments may have the
same partner, so an exchange of one of many fragments opens fewer stripes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import trio

from peer.averaging.parts import AveragingParts
from peer.codec import get_codec
from peer.facts import PeerState
from peer.observe.events import NamedEvents
from peer.rounds.loop import RoundLoop
from peer.rounds.pace import Pace
from peer.rounds.validation import Validation
from peer.rounds.way import TrainerLine
from peer.training.messages import (
    Ready,
    RoundClosed,
    SyncEvent,
    TrainerProgress,
)
from peer.training.ports import StartTrainer
from protocol.diloco.trainer_messages import (
    ONE_CHUNK,
    FragmentSent,
    Merge,
)
from protocol.fragment.fragments import Fragment, fragment_layout_digest, fragments_of_run
from protocol.gossip.final_averaging import Meeting
from protocol.limits import MAX_STRIPES
from protocol.membership.group import Group
from protocol.membership.view import Member
from protocol.run.layout import Layout
from protocol.schedule.rounds import OwnRounds, RoundPlan, keep_together

from .final_averaging import FinalRounds, Meetings
from .lane import GossipDoor, Lane, lane_of
from .outer_state import Float32Vector, OuterState
from .outer_step import NolocoFactors

# --- fragment lanes -------------------------------------------------------------------------------


class FragmentLanes:
    """The lanes of all fragments, in order. Implements `final_averaging.Meetings`.

    Args:
        delta_P: outer momentum, in the order of the flat vector.
        factors: of the outer step of each fragment.
    """

    def __init__(
        self,
        parts: AveragingParts,
        fragments: Sequence[Fragment],
        delta_P: Float32Vector,
        factors: NolocoFactors,
        lock: trio.Lock,
    ) -> None:
        self._parts = parts
        self._lock = lock
        self._max_stripes = max(0, MAX_STRIPES // len(fragments) - 1)
        self.lanes: tuple[Lane, ...] = tuple(
            self._lane(fragment, delta_P, factors) for fragment in fragments
        )

    @property
    def disagreements(self) -> int:
        """Meetings left out because the partner sees another roster: of the worst fragment."""
        return max(lane.meetings.disagreements for lane in self.lanes)

    def begin(self, roster: str) -> None:
        """From now on the roster with this digest is ours, for all fragments."""
        for lane in self.lanes:
            lane.meetings.begin(roster)

    def _lane(self, fragment: Fragment, delta_P: Float32Vector, factors: NolocoFactors) -> Lane:
        parts, held = self._parts, self._parts.held
        codec = get_codec(held.codec, part_of=held.shape.padded_parameters)
        return lane_of(
            parts,
            OuterState(parts.slow_P, delta_P, codec, factors, fragment.spans),
            group=Group(held.group.run_id, f"fragment/{fragment.index}").digest,
            layout_digest=fragment_layout_digest(held.shape.layout_digest, fragment),
            size=fragment.size,
            company=parts.company_of(fragment.index),
            events=NamedEvents(parts.events, fragment=fragment.index),
            lock=self._lock,
            max_stripes=self._max_stripes,
        )


# --- streaming rounds -----------------------------------------------------------------------------

MEETINGS_AT_ONCE: Final = 4
"""Fragments that hold a planned meeting at the same time: each after the one so many before it.
Both sides keep to that order, so neither waits for what the other has not come to."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One flight's turn to exchange: after the one `before` if there is such, and then `ended`."""

    before: trio.Event | None
    ended: trio.Event

    async def __aenter__(self) -> None:
        """Wait for it."""
        if self.before is not None:
            await self.before.wait()

    async def __aexit__(self, *_: object) -> None:
        """The next one may come."""
        self.ended.set()


class StreamingRounds:
    """See the top of the file. Implements `peer.rounds.way.Way`.

    Args:
        new_lanes: makes the fragments' lanes of a layout, which the first trainer tells.
        new_finale: makes the final averaging with the meetings of all fragments.
        ends_with_flush: there is no final averaging.
    """

    def __init__(
        self,
        rounds: OwnRounds,
        pace: Pace,
        *,
        new_lanes: Callable[[Layout], FragmentLanes],
        new_finale: Callable[[Meetings], FinalRounds],
        ends_with_flush: bool,
        validation: Validation,
    ) -> None:
        self._rounds = rounds
        self._pace = pace
        self._new_lanes = new_lanes
        self._new_finale = new_finale
        self._flush_is_due = ends_with_flush
        self._validation = validation
        self._line: TrainerLine | None = None
        self._lanes: FragmentLanes | None = None
        self._finale: FinalRounds | None = None
        self._at_rest = trio.Lock()
        self._exchanged: dict[int, trio.Event] = {}
        self._flights = 0
        self._settled = trio.Event()
        self._settled.set()
        self._is_leaving = False
        self._sent_s: dict[int, float] = {}

    @property
    def version(self) -> int:
        """Version of the slow weights."""
        lanes = self._lanes.lanes if self._lanes else ()
        return sum(lane.outer.version for lane in lanes)

    @property
    def flights(self) -> int:
        """How many there are now."""
        return self._flights

    # --- which rounds are trained -----------------------------------------------------------------
    def enter(self, others: Sequence[Member]) -> None:
        """Go on where the others are, if they are ahead."""
        self._rounds.enter([m.progress.step for m in others])

    def next_round(self, others: Sequence[Member]) -> RoundPlan | None:
        """The next round of training; None when the training is over."""
        if self._rounds.is_over:
            return None
        return self._rounds.plan(self._pace.owed(self._rounds.step, others, keep_together))

    def closes_early(self, others: Sequence[Member]) -> bool:
        """Never: a peer that is behind jumps when it closes its round."""
        return False

    async def next_final_round(self) -> RoundPlan | None:
        """The next round of no steps; None when averaging is over.

        Raises:
            JoinAgain: the others have ended the run without us.
        """
        assert self._line is not None
        assert self._finale is not None
        await self._settled.wait()
        if self._flush_is_due:
            self._flush_is_due = False
        elif not await self._finale.goes_on(self._line):
            return None
        return self._rounds.plan(1.0)

    # --- what happens to them ---------------------------------------------------------------------
    def began(self, line: TrainerLine, ready: Ready) -> None:
        """A trainer has started; the first one tells the layout."""
        self._line = line
        if self._lanes is None:
            self._lanes = self._new_lanes(Layout.from_shapes(dict(ready.shapes)))
            self._finale = self._new_finale(self._lanes)
        self._sent_s = dict.fromkeys(range(len(self._lanes.lanes)), trio.current_time())

    def progressed(self, progress: TrainerProgress) -> None:
        """Nothing to do."""

    async def closed(self, closed: RoundClosed, others: Sequence[Member]) -> None:
        """The next round may begin at once; after the training, when all flights have ended."""
        assert self._line is not None
        self._rounds.closed(closed.step, [m.progress.step for m in others])
        if self._rounds.is_over:
            await self._settled.wait()
        else:
            self._line.nursery.start_soon(self._validate, self._line, closed.round)

    async def took(self, event: SyncEvent) -> None:
        """A fragment was sent, or merged."""
        if not isinstance(event, FragmentSent) or self._is_leaving:
            return
        assert self._line is not None
        assert self._finale is not None
        self._flights += 1
        if self._settled.is_set():
            self._settled = trio.Event()
        before = self._exchanged.get(event.fragment - MEETINGS_AT_ONCE)
        exchanged = self._exchanged[event.fragment] = trio.Event()
        meeting = self._finale.meeting
        turn = Turn(None if meeting is None else before, exchanged)
        self._line.nursery.start_soon(self._average, self._line, event, meeting, turn)

    async def died(self) -> None:
        """Flights under way need no trainer: let them end."""
        await self._settled.wait()
        self._line = None

    def leave(self) -> None:
        """No flight begins any more."""
        self._is_leaving = True

    async def wait_settled(self) -> None:
        """Wait until all flights have ended."""
        await self._settled.wait()

    # --- flights ----------------------------------------------------------------------------------
    async def _average(
        self, line: TrainerLine, sent: FragmentSent, meeting: Meeting | None, turn: Turn
    ) -> None:
        """Average a fragment that was sent, take its outer step, and tell the trainer."""
        assert self._lanes is not None
        lane, now_s = self._lanes.lanes[sent.fragment], trio.current_time()
        train_s, self._sent_s[sent.fragment] = now_s - self._sent_s[sent.fragment], now_s
        try:
            own = await lane.steps.contribution(
                line.trainer.codes(sent.fragment),
                sent.digest,
                round=lane.outer.round + 1,
                step=int(sent.step),
                steps=sent.steps,
                tokens=sent.tokens,
            )
            async with turn:
                settled = await lane.steps.average(own, meeting, self._rounds.next_length)
            async with self._at_rest:
                await lane.steps.take(settled, meeting, train_s)
            await line.send(Merge(sent.fragment, sent.cycle, ONE_CHUNK, ()))
        finally:
            self._flights -= 1
            if not self._flights:
                self._settled.set()

    async def _validate(self, line: TrainerLine, round_: int) -> None:
        """Have the slow weights measured if that is due; no flight writes them meanwhile."""
        async with self._at_rest:
            if self._validation.is_due(round_):
                await self._validation.begin(line, round_)
                await self._validation.wait_idle()


# --- the way, put together ------------------------------------------------------------------------


class StreamingAveraging:
    """Streaming gossip. Implements `peer.averaging.parts.Averaging`."""

    def __init__(self, parts: AveragingParts) -> None:
        self._parts = parts
        self.slow_P, self.momentum_P = parts.slow_P, np.zeros(parts.slow_P.size, np.float32)
        self.lock = trio.Lock()
        self._stands_after = -1
        self._rounds: StreamingRounds | None = None
        self._lanes: FragmentLanes | None = None
        self._begun = trio.Event()

    @property
    def round(self) -> int:
        """The last that is over; fragments are stepped within rounds."""
        facts = self._parts.facts
        return facts.round if facts.state is PeerState.FINISHED else facts.round - 1

    @property
    def senders(self) -> int:
        """A partner of each fragment under way."""
        return max(1, self._rounds.flights) if self._rounds else 1

    def stands_after(self, round_: int) -> None:
        """Both vectors are whole, as they stand after this round."""
        self._stands_after = round_

    def begin(self, start_trainer: StartTrainer) -> RoundLoop:
        """The rounds."""
        parts, validation = self._parts, self._parts.validation()
        sync, facts = parts.spec.sync, parts.facts
        self._rounds = StreamingRounds(
            OwnRounds(
                facts.peer_id,
                sync.round_steps,
                parts.amended.total_steps_at,
                facts.round,
                facts.nominal_step,
            ),
            Pace(sync.round_steps, facts),
            new_lanes=self._new_lanes,
            new_finale=partial(self._new_finale, validation),
            ends_with_flush=not sync.final_averaging,
            validation=validation,
        )
        return parts.loop(self._rounds, validation, start_trainer)

    async def serve(self) -> None:
        """Look for partners and answer proposals until cancelled; from the first trainer on."""
        await self._begun.wait()
        assert self._lanes is not None
        gossips = [lane.gossip for lane in self._lanes.lanes]
        await GossipDoor(self._parts.network, gossips).run()

    def _new_lanes(self, layout: Layout) -> FragmentLanes:
        sync = self._parts.spec.sync
        assert sync.streaming is not None
        fragments = fragments_of_run(sync.streaming, layout)
        factors = NolocoFactors(sync.alpha, sync.beta, gamma=sync.beta)
        self._lanes = FragmentLanes(self._parts, fragments, self.momentum_P, factors, self.lock)
        for lane in self._lanes.lanes:
            lane.outer.stands_after(self._stands_after)
        self._begun.set()
        return self._lanes

    def _new_finale(self, validation: Validation, meetings: Meetings) -> FinalRounds:
        parts = self._parts
        return FinalRounds(
            wanted=parts.spec.sync.final_averaging,
            facts=parts.facts,
            view=parts.held.view,
            company=parts.company_of(0),
            held=meetings,
            validation=validation,
            events=parts.events,
        )
