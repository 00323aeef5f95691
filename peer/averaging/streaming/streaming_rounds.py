"""Rounds of streaming gossip: they pace data and schedule; fragments are averaged beside them.

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
  fragments: the meetings of the final averaging (gossip/final_rounds.py), where all fragments meet
  the same partner, a few at a time. A run without them has one such round, with partners as in
  training, for what was trained since the last moments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from peer.averaging.gossip.final_rounds import FinalRounds, Meetings
from peer.rounds.pace import Pace
from peer.rounds.validation import Validation
from peer.rounds.way import TrainerLine
from peer.training.messages import (
    ONE_CHUNK,
    FragmentSent,
    Merge,
    Progress,
    Ready,
    RoundClosed,
    SyncEvent,
)
from protocol.gossip.final_averaging import Meeting
from protocol.membership.view import Member
from protocol.run.layout import Layout
from protocol.schedule.own_rounds import OwnRounds, RoundPlan
from protocol.schedule.rounds import keep_together

from .fragment_lanes import FragmentLanes

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

    def progressed(self, progress: Progress) -> None:
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
                line.trainer.fragment_codes(sent.fragment),
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
