"""Rounds of Streaming DiLoCo: they pace data and schedule; averaging goes on beside them.

A round is opened as soon as the one before is closed. The trainer sends each fragment at its moment
of the round; what comes of it is the business of its keeper
(peer/averaging/diloco/fragment_keeper.py), for which this file is the trainer's side:

- Which sends of *this* trainer are in flight: nobody tells a new trainer of an old one's.
- Who may write the outer copy: nobody while the trainer reads all of it (load, validation), and of
  a fragment that is not in flight only after the trainer has yielded it. A Yield that crosses a
  send on its way is void; the keeper finds the send in its inbox, and goes on from there.

The last round trains nothing: every fragment that has not been sent since the last inner step is
sent once more, and the run is over when all are back. All sends after that step, and no others, are
of the cycle `total_rounds` (the fragment that goes at the end of a round has made its own by then).
That cycle is averaged plainly, so a run ends with the mean of all peers' weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from peer.averaging.diloco.fragment_exchange import FragmentExchange, FragmentSurroundings
from peer.averaging.diloco.fragment_items import Changes, Held, Returned, Sent
from peer.averaging.diloco.nesterov import Factors
from peer.averaging.diloco.outer_fragments import OuterFragments
from peer.codec import get_codec
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.observe.status import PeerState
from peer.ports import Network, PeerId, Work
from peer.process.rejoin import join_the_finished
from peer.rounds.pace import Pace
from peer.rounds.timing import RoundTiming
from peer.rounds.validation import Validation
from peer.rounds.way import TrainerLine
from peer.training.messages import (
    Amend,
    FragmentMerged,
    FragmentSent,
    Merge,
    Progress,
    Ready,
    RoundClosed,
    SyncEvent,
    Yield,
    Yielded,
)
from peer.training.ports import Float32Vector
from protocol.fragment.fragments import fragments_of_run, last_sent
from protocol.membership.records import Sign
from protocol.membership.view import Member, View
from protocol.outcomes import SkipReason
from protocol.run.layout import Layout
from protocol.run.run_spec import RunSpec
from protocol.schedule.own_rounds import RoundPlan
from protocol.schedule.rounds import Quotas, catch_up, is_left_behind, next_round

LATE_ROUNDS: Final = 3
"""A peer that is further from a cycle than this, by what was last heard, is not waited for."""


@dataclass(frozen=True, slots=True)
class FragmentMeans:
    """By what means fragments are averaged, and told of."""

    network: Network
    work: Work
    sign: Sign
    events: EventLog
    observe_round: Callable[[RoundTiming], None]


class FragmentRounds:
    """See the top of the file. `serve` must be running. Implements `peer.rounds.way.Way`.

    Args:
        momentum_P: v, in the order of the flat vector.
        lock: held while slow weights and momentum move.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        facts: Facts,
        view: View,
        slow_P: Float32Vector,
        momentum_P: Float32Vector,
        lock: trio.Lock,
        validation: Validation,
        means: FragmentMeans,
    ) -> None:
        self._spec = spec
        self._facts = facts
        self._view = view
        self._slow_P = slow_P
        self._momentum_P = momentum_P
        self._lock = lock
        self._validation = validation
        self._means = means
        self._network = means.network
        self._pace = Pace(spec.sync.inner_steps, facts)
        self._quotas = Quotas()
        self._next_round = facts.round
        self._line: TrainerLine | None = None
        self._exchange: FragmentExchange | None = None
        self._begun = trio.Event()
        self._loaded = trio.Event()
        self._in_flight: dict[int, int] = {}
        self._holding: dict[int, trio.Event] = {}
        self._yielded: set[int] = set()
        self._all_back = trio.Event()
        self._all_back.set()
        self._last_averaged: list[bool] = []

    def __repr__(self) -> str:
        return f"<FragmentRounds before {self._next_round}, in flight {self._in_flight}>"

    async def serve(self) -> None:
        """Average with the others, until cancelled; from the first trainer on."""
        await self._begun.wait()
        assert self._exchange is not None
        await self._exchange.run()

    # --- which rounds are trained -----------------------------------------------------------------
    @property
    def version(self) -> int:
        """Version of the slow weights."""
        return self._facts.round

    def enter(self, others: Sequence[Member]) -> None:
        """Go on with the newest round that is heard of."""
        self._next_round = max([self._next_round, *self._heard_rounds(others)])

    def next_round(self, others: Sequence[Member]) -> RoundPlan | None:
        """The next round of training; None when the training is over."""
        round_, inner_steps = self._next_round, self._spec.sync.inner_steps
        if round_ >= self._spec.total_rounds:
            return None
        step = float(round_ * inner_steps)
        quota = self._quotas.next(self._pace.owed(step, others, catch_up))
        return RoundPlan(round_, quota, step, inner_steps / quota)

    def is_behind(self, others: Sequence[Member]) -> bool:
        """Whether the round in training should be given up for a newer one."""
        return is_left_behind(self._facts.round, self._heard_rounds(others))

    async def next_final_round(self) -> RoundPlan | None:
        """One more without steps, which sends what has not been sent; then all must be back.

        Raises:
            JoinAgain: the others have ended the run without us.
        """
        total = self._spec.total_rounds
        if self._next_round <= total:
            return RoundPlan(total, 0, float(total * self._spec.sync.inner_steps), 1.0)
        await self._all_back.wait()
        if self._last_averaged and not any(self._last_averaged):
            join_the_finished(self._view.alive(trio.current_time()))
        return None

    def _heard_rounds(self, others: Sequence[Member]) -> list[int]:
        """But for those that say they are past the end, where nobody can be."""
        rounds = (member.progress.round for member in others)
        return [round_ for round_ in rounds if round_ <= self._spec.total_rounds]

    # --- what happens to them ---------------------------------------------------------------------
    def began(self, line: TrainerLine, ready: Ready) -> None:
        """A trainer has started; the first one tells the layout."""
        self._line = line
        self._loaded = trio.Event()
        if self._exchange is None:
            self._exchange = self._new_exchange(Layout.from_shapes(dict(ready.shapes)))
            self._begun.set()

    def progressed(self, progress: Progress) -> None:
        """The trainer has taken what it loaded."""
        self._loaded.set()

    async def closed(self, closed: RoundClosed, others: Sequence[Member]) -> None:
        """Validate if it is due; the next round may begin at once."""
        self._loaded.set()
        assert self._line is not None
        self._means.observe_round(RoundTiming(closed.seconds, 0.0, 0.0, 0.0))
        if self._validation.is_due(closed.round):
            async with self._lock:  # nothing is half written
                await self._validation.begin(self._line, closed.round)
        self._next_round = next_round(closed.round, self._heard_rounds(others))

    def _new_exchange(self, layout: Layout) -> FragmentExchange:
        sync, held = self._spec.sync, self._facts.held
        assert sync.diloco is not None
        assert held is not None
        fragments = fragments_of_run(sync.diloco, layout)
        outer = OuterFragments(
            fragments,
            self._slow_P,
            self._momentum_P,
            get_codec(held.codec, part_of=layout.padded_parameters),
            Factors(sync.diloco.learning_rate, sync.diloco.momentum),
            last_cycle=self._spec.total_rounds,
        )
        outer.begin()
        around = FragmentSurroundings(
            group=held.group.digest,
            network=self._network,
            work=self._means.work,
            sign=self._means.sign,
            round=lambda: self._facts.round,
            present=self._present,
            is_over=lambda: self._facts.state is PeerState.FINISHED,
            expected=self._expected,
            last_sent=[
                last_sent(index, len(fragments), sync.inner_steps, self._next_round)
                for index in range(len(fragments))
            ],
        )
        exchange = FragmentExchange(
            around, outer=outer, trainer=self, lock=self._lock, returned=self._returned
        )
        exchange.refused = self._facts.refused
        return exchange

    async def took(self, event: SyncEvent) -> None:
        """A fragment was sent, merged or yielded."""
        self._loaded.set()
        match event:
            case FragmentSent():
                self._sent(event)
            case FragmentMerged():
                self._facts.stalled_s += event.waited_s
            case Yielded(fragment):
                self._yielded.add(fragment)
                self._stop_holding(fragment)

    def _sent(self, event: FragmentSent) -> None:
        assert self._line is not None
        assert self._exchange is not None
        self._in_flight[event.fragment] = event.cycle
        if self._all_back.is_set():
            self._all_back = trio.Event()
        self._stop_holding(event.fragment)
        codes = self._line.trainer.fragment_codes(event.fragment)
        self._exchange.sent(event.fragment, Sent(event.cycle, codes, event.steps, event.tokens))

    async def died(self) -> None:
        """Nothing is in flight any more: nobody tells a new trainer of an old one's sends."""
        self._line = None
        self._loaded.set()
        self._in_flight.clear()
        self._yielded.clear()
        self._all_back.set()
        for fragment in list(self._holding):
            self._stop_holding(fragment)

    async def wait_settled(self) -> None:
        """Wait until no send is under way."""
        await self._all_back.wait()

    # --- the trainer's side of the keepers --------------------------------------------------------
    async def may_write(self) -> None:
        """Wait until the trainer does not read the whole outer copy."""
        while not self.can_write:
            await self._validation.wait_idle()
            await self._loaded.wait()

    @property
    def can_write(self) -> bool:
        """Whether it does not."""
        return self._validation.is_idle and self._loaded.is_set()

    async def merge(self, fragment: int, cycle: int, changes: Changes) -> None:
        """The send is over; tell the trainer that made it."""
        if self._in_flight.get(fragment) == cycle and self._line is not None:
            del self._in_flight[fragment]
            stepped, moved = tuple(sorted(changes.stepped)), tuple(sorted(changes.moved))
            await self._line.send(Merge(fragment, cycle, stepped, moved))
        if not self._in_flight:
            self._all_back.set()

    async def hold(self, fragment: int) -> Held:
        """Make the trainer read nothing of the fragment until `amend`."""
        if self._line is None:
            return Held.FREE
        if fragment in self._in_flight:
            return Held.VOID
        answered = self._holding[fragment] = trio.Event()
        await self._line.send(Yield(fragment))
        await answered.wait()
        if fragment in self._yielded:
            return Held.YIELDED
        return Held.VOID if fragment in self._in_flight else Held.FREE

    def _stop_holding(self, fragment: int) -> None:
        if (answered := self._holding.pop(fragment, None)) is not None:
            answered.set()

    async def amend(self, fragment: int, changes: Changes) -> None:
        """Tell the trainer that yielded what has changed."""
        if fragment in self._yielded and self._line is not None:
            self._yielded.discard(fragment)
            await self._line.send(
                Amend(
                    fragment,
                    merged=tuple(sorted(changes.stepped)),
                    redone=tuple(sorted(changes.redone)),
                    moved=tuple(sorted(changes.moved)),
                )
            )

    # --- the others -------------------------------------------------------------------------------
    def _others(self) -> list[Member]:
        """The others that train; but for those that say they are past the end."""
        training = self._view.members_training(trio.current_time())
        return [m for m in training if m.progress.round <= self._spec.total_rounds]

    def _members(self) -> set[PeerId]:
        """Who takes part now, ourselves among them."""
        return {self._network.peer_id, *(member.peer_id for member in self._others())}

    def _present(self) -> set[PeerId]:
        """Who holds an outer copy, ourselves among them."""
        alive = self._view.alive(trio.current_time())
        states = (PeerState.TRAINING, PeerState.FINISHED)
        return {self._network.peer_id, *(m.peer_id for m in alive if m.progress.state in states)}

    def _expected(self, cycle: int) -> set[PeerId]:
        """Who should contribute to a cycle about now; nobody to one that is far from ours."""
        near = range(cycle - LATE_ROUNDS, cycle + LATE_ROUNDS)
        if self._facts.round not in near:
            return set()
        others = (m.peer_id for m in self._others() if m.progress.round in near)
        return {self._network.peer_id, *others}

    def _returned(self, returned: Returned) -> None:
        assert self._exchange is not None
        facts, averaged = self._facts, returned.contributors > 1
        healing = self._exchange.statistics()
        facts.diverged, facts.healed = healing.diverged, healing.healed
        facts.healed_s = healing.healed_s
        if returned.cycle >= self._spec.total_rounds:
            self._last_averaged.append(averaged)
        if averaged:
            facts.count_averaged()
        else:
            alone = len(self._members()) == 1
            facts.count_skipped(SkipReason.NO_PARTNER if alone else SkipReason.DEADLINE)
        self._means.events.emit(
            EventName.FRAGMENT_RETURNED,
            round=returned.cycle,
            fragment=returned.fragment,
            contributors=returned.contributors,
            missing=returned.missing,
            moved=returned.moved,
            digest=returned.digest,
            seconds=returned.seconds,
        )
