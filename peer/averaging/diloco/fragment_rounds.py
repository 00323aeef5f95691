"""Rounds of Streaming DiLoCo: they pace data and schedule; averaging goes on beside them.

A round is opened as soon as the one before is closed. The trainer sends each fragment at its moment
of the round; the exchange (fragment_exchange.py) deals with it, and `CurrentTrainer` is its
trainer.

The last round trains nothing: every fragment that has not been sent since the last inner step is
sent once more, and the run is over when all are back. All sends after that step, and no others, are
of the cycle `total_rounds` (the fragment that goes at the end of a round has made its own by then).
That cycle is averaged plainly, so a run ends with the mean of all peers' weights.

The outer copy is not written while the trainer reads all of it (load, validation), and a fragment
that is not in flight only after the trainer has yielded it. A Yield that crosses a send on its way
is void; the fragment's machine goes on from that send.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import trio

from peer.codec import get_codec
from peer.facts import Facts, PeerState, RoundTiming
from peer.observe.event_names import EventName
from peer.process.rejoin import join_the_finished
from peer.rounds.loop import RoundLoop
from peer.rounds.pace import Pace
from peer.rounds.validation import Validation
from peer.rounds.way import AveragingParts, TrainerLine
from peer.runtime import PeerId
from peer.training.messages import Ready, RoundClosed, SyncEvent
from peer.training.ports import StartTrainer
from protocol import trainer_messages
from protocol.content.samples import Float32Vector
from protocol.diloco.commands import GroupSeen, HoldOutcome, SendEnded, Sent
from protocol.diloco.peers import LATE_ROUNDS, FragmentCounts
from protocol.fragment.fragments import fragments_of_run, last_sent
from protocol.membership.view import TRAINING, Member, View
from protocol.outcomes import SkipReason
from protocol.run.amendments import AmendedSpec
from protocol.run.layout import Layout
from protocol.schedule.rounds import Quotas, RoundPlan, catch_up, is_left_behind, middle, next_round

from .fragment_exchange import FragmentExchange, FragmentParts
from .nesterov import NesterovFactors
from .outer_fragments import OuterFragments


# --- linked members -------------------------------------------------------------------------------
class LinkedMembers:
    """Implements `GroupMembers` (fragment_exchange.py)."""

    def __init__(self, own_id: PeerId, facts: Facts, view: View, spec: AmendedSpec) -> None:
        self._own_id = own_id
        self._facts = facts
        self._view = view
        self._spec = spec

    def seen(self) -> GroupSeen:
        """Our group as the core sees it; stuck peers are left out."""
        now_s = trio.current_time()
        alive = self._view.alive(now_s)
        states = (PeerState.TRAINING, PeerState.FINISHED)
        holding = (
            m.peer_id for m in alive if m.progress.state in states and not self._is_stuck(m, now_s)
        )
        relayed = {m.peer_id for m in alive if m.relayed}
        if self._facts.reach.relays:
            relayed.add(self._own_id)
        return GroupSeen(
            round=self._facts.round,
            present=frozenset([self._own_id, *holding]),
            rounds={member.peer_id: member.progress.round for member in self._training(alive)},
            is_over=self._facts.state is PeerState.FINISHED,
            lives={member.peer_id: member.incarnation for member in alive},
            known=frozenset(member.peer_id for member in self._view.members()),
            relayed=frozenset(relayed),
        )

    def is_linked(self, peer_id: PeerId) -> bool:
        return self._view.is_linked(peer_id, trio.current_time())

    @property
    def is_alone(self) -> bool:
        return not self._training(self._view.alive(trio.current_time()))

    def _is_stuck(self, member: Member, now_s: float) -> bool:
        """Whether a peer stands still while we go on; all may stand still, and wait for lines."""
        trains = member.progress.state == PeerState.TRAINING
        is_late = member.progress.round < self._facts.round - LATE_ROUNDS
        return trains and is_late and not member.goes_on(now_s)

    def _training(self, alive: Iterable[Member]) -> list[Member]:
        """Other training peers, except those that say they are past the end of the run."""
        longest = self._spec.longest_rounds
        training = (member for member in alive if member.progress.state == TRAINING)
        return [member for member in training if member.progress.round <= longest]


# --- current trainer ------------------------------------------------------------------------------
class CurrentTrainer:
    """The trainer that runs now, with what it has sent and yielded: a `FragmentTrainer`."""

    def __init__(self, validation: Validation) -> None:
        self._validation = validation
        self._line: TrainerLine | None = None
        self._loaded = trio.Event()
        self._in_flight: dict[int, int] = {}
        self._holding: dict[int, trio.Event] = {}
        self._yielded: set[int] = set()
        self._all_back = trio.Event()
        self._all_back.set()

    @property
    def line(self) -> TrainerLine:
        assert self._line is not None
        return self._line

    async def wait_all_back(self) -> None:
        await self._all_back.wait()

    # --- its life ---------------------------------------------------------------------------------
    def began(self, line: TrainerLine) -> None:
        self._line = line
        self._loaded = trio.Event()

    def loaded(self) -> None:
        self._loaded.set()

    def sent(self, event: trainer_messages.FragmentSent) -> None:
        self._in_flight[event.fragment] = event.cycle
        if self._all_back.is_set():
            self._all_back = trio.Event()
        self._stop_holding(event.fragment)

    def yielded(self, fragment: int) -> None:
        """The trainer does not read this fragment until `merge`."""
        self._yielded.add(fragment)
        self._stop_holding(fragment)

    def died(self) -> None:
        """Nothing is in flight: a new trainer is not told of an old one's sends."""
        self._line = None
        self._loaded.set()
        self._in_flight.clear()
        self._yielded.clear()
        self._all_back.set()
        for fragment in list(self._holding):
            self._stop_holding(fragment)

    def _stop_holding(self, fragment: int) -> None:
        if (answered := self._holding.pop(fragment, None)) is not None:
            answered.set()

    # --- what the exchange asks of it -------------------------------------------------------------
    async def may_write(self) -> None:
        while not self.can_write:
            await self._validation.wait_idle()
            await self._loaded.wait()

    @property
    def can_write(self) -> bool:
        return self._validation.is_idle and self._loaded.is_set()

    async def merge(self, message: trainer_messages.Merge) -> None:
        fragment = message.fragment
        if message.cycle is None:
            knows = fragment in self._yielded
            self._yielded.discard(fragment)
        elif knows := self._in_flight.get(fragment) == message.cycle:
            del self._in_flight[fragment]
        if knows and self._line is not None:
            await self._line.send(message)
        if not self._in_flight:
            self._all_back.set()

    async def hold(self, message: trainer_messages.Yield) -> HoldOutcome:
        fragment = message.fragment
        if self._line is None:
            return HoldOutcome.FREE
        if fragment in self._in_flight:
            return HoldOutcome.VOID
        answered = self._holding[fragment] = trio.Event()
        await self._line.send(message)
        await answered.wait()
        if fragment in self._yielded:
            return HoldOutcome.YIELDED
        return HoldOutcome.VOID if fragment in self._in_flight else HoldOutcome.FREE


# --- fragment rounds ------------------------------------------------------------------------------
class FragmentRounds:
    """The rounds of one peer: a `Way` (peer/rounds/way.py).

    Args:
        begun: is set when there is an `exchange`, which must be run then.
    """

    def __init__(
        self,
        parts: AveragingParts,
        momentum_P: Float32Vector,
        lock: trio.Lock,
        validation: Validation,
        begun: trio.Event,
    ) -> None:
        self._parts = parts
        self._amended, self._spec = parts.amended, parts.spec
        self._facts = parts.services.facts
        self._view = parts.held.view
        self._momentum_P = momentum_P
        self._lock = lock
        self._validation = validation
        self._pace = Pace(self._spec.sync.round_steps, self._facts)
        self._quotas = Quotas()
        self._next_round = self._facts.round
        self._last_trained = -1
        self._last_averaged: list[bool] = []
        self._members = LinkedMembers(
            parts.services.network.peer_id, self._facts, self._view, self._amended
        )
        self._counts = FragmentCounts(refused=self._facts.refused, audits=self._facts.audits)
        self._trainer = CurrentTrainer(validation)
        self.exchange: FragmentExchange | None = None
        self._begun = begun

    # --- which rounds are trained -----------------------------------------------------------------
    def enter(self, others: Sequence[Member]) -> None:
        theirs = middle(self._heard_rounds(others), self._next_round)
        self._next_round = max(self._next_round, int(theirs))

    def next_round(self, others: Sequence[Member]) -> RoundPlan | None:
        round_, inner_steps = self._next_round, self._spec.sync.round_steps
        if round_ >= self._amended.at_round(round_).total_rounds:
            return None
        step = float(round_ * inner_steps)
        quota = self._quotas.next(self._pace.owed(step, others, catch_up))
        return RoundPlan(round_, quota, step, inner_steps / quota)

    def closes_early(self, steps: int, others: Sequence[Member]) -> bool:
        is_behind = is_left_behind(self._facts.round, self._heard_rounds(others))
        return is_behind or self._pace.is_overdone(others)

    async def next_final_round(self) -> RoundPlan | None:
        """A last round without steps, which sends what has not been sent; then all must be back.

        Raises:
            JoinAgain: the others have ended the run without us.
        """
        total = self._amended.at_round(self._next_round).total_rounds
        if self._next_round <= total:
            return RoundPlan(total, 0, float(total * self._spec.sync.round_steps), 1.0)
        await self._trainer.wait_all_back()
        heard_too_late = self._last_trained >= total  # of an amendment that has shortened the run
        ended_alone = bool(self._last_averaged) and not any(self._last_averaged)
        if ended_alone or heard_too_late:
            join_the_finished(self._view.alive(trio.current_time()))
        return None

    def _heard_rounds(self, others: Sequence[Member]) -> list[int]:
        """Rounds that other training peers report, within the run."""
        rounds = (member.progress.round for member in others)
        return [round_ for round_ in rounds if round_ <= self._amended.longest_rounds]

    # --- what happens to them ---------------------------------------------------------------------
    def on_trainer_started(self, line: TrainerLine, ready: Ready) -> None:
        """A trainer has started; the first one tells the layout."""
        self._trainer.began(line)
        if self.exchange is None:
            self.exchange = self._new_exchange(Layout.from_shapes(dict(ready.shapes)))
            self._begun.set()

    def on_progress(self) -> None:
        self._trainer.loaded()

    async def on_round_closed(self, closed: RoundClosed, others: Sequence[Member]) -> None:
        self._trainer.loaded()
        self._parts.observe_round(RoundTiming(closed.seconds, 0.0, 0.0, 0.0))
        if self._validation.is_due(closed.round):
            async with self._lock:  # nothing is half written
                await self._validation.begin_next(self._trainer.line, closed.round)
        if closed.steps:
            self._last_trained = closed.round
        self._next_round = next_round(closed.round, self._heard_rounds(others))

    def _new_exchange(self, layout: Layout) -> FragmentExchange:
        sync, held = self._spec.sync, self._parts.held
        assert sync.diloco is not None
        fragments = fragments_of_run(sync.diloco, layout)
        outer = OuterFragments(
            fragments,
            self._parts.slow_P,
            self._momentum_P,
            get_codec(held.codec, part_of=layout.padded_parameters),
            NesterovFactors(sync.diloco.learning_rate, sync.diloco.momentum),
            is_last=self._amended.is_last_round,
        )
        parts = FragmentParts(
            services=self._parts.services,
            group=held.group.digest,
            members=self._members,
            trainer=self._trainer,
            ended=self._send_ended,
            convict=self._parts.convict,
            proofs=self._parts.proofs,
            lock=self._lock,
            counts=self._counts,
            inner_steps=sync.round_steps,
            trims=sync.diloco.robust == "trim",
            last_sent=[
                last_sent(index, len(fragments), sync.round_steps, self._next_round)
                for index in range(len(fragments))
            ],
        )
        return FragmentExchange(parts, outer)

    def _send_ended(self, ended: SendEnded) -> None:
        facts, counts, averaged = self._facts, self._counts, ended.contributors > 1
        facts.diverged, facts.healed = counts.diverged, counts.healed
        facts.healed_s = counts.healed_s
        if self._amended.is_last_round(ended.cycle):
            self._last_averaged.append(averaged)
        if averaged:
            facts.count_averaged()
        else:
            alone = self._members.is_alone
            facts.count_skipped(SkipReason.NO_PARTNER if alone else SkipReason.DEADLINE)
        self._parts.services.events.emit(
            EventName.FRAGMENT_RETURNED,
            round=ended.cycle,
            fragment=ended.fragment,
            contributors=ended.contributors,
            missing=ended.missing,
            moved=ended.moved,
            digest=ended.digest,
            seconds=ended.seconds,
        )

    async def on_event(self, event: SyncEvent) -> None:
        self._trainer.loaded()
        match event:
            case trainer_messages.FragmentSent():
                assert self.exchange is not None
                self._trainer.sent(event)
                codes = self._trainer.line.trainer.codes(event.fragment)
                self.exchange.sent(
                    Sent(event.fragment, event.cycle, codes, event.steps, event.tokens)
                )
            case trainer_messages.FragmentMerged():
                self._facts.stalled_s += event.waited_s
            case trainer_messages.Yielded(fragment):
                self._trainer.yielded(fragment)

    async def on_trainer_died(self) -> None:
        self._trainer.died()

    def leave(self) -> None:
        """Nothing to do: an exchange begins when a fragment is sent, and none is sent any more."""

    async def wait_idle(self) -> None:
        await self._trainer.wait_all_back()


# --- the way of averaging -------------------------------------------------------------------------
class FragmentAveraging:
    """Streaming DiLoCo."""

    def __init__(self, parts: AveragingParts) -> None:
        self._parts = parts
        self.slow_P, self.momentum_P = parts.slow_P, np.zeros_like(parts.slow_P)
        self._rounds: FragmentRounds | None = None
        self._begun = trio.Event()
        self.lock = trio.Lock()

    @property
    def round(self) -> int:
        return self._parts.services.facts.round_over

    @property
    def senders(self) -> int:
        """The other peers, once there are rounds: one that has finished still heals us."""
        if self._rounds is None:
            return 1
        return len(self._parts.held.view.alive(trio.current_time()))

    def set_first_round(self, round_: int) -> None:
        """The vectors hold our first state. What each chunk lacks since, it heals."""

    def begin(self, start_trainer: StartTrainer) -> RoundLoop:
        parts = self._parts
        validation = Validation(parts.spec.sync.validate_every, parts.services, parts.domains)
        rounds = FragmentRounds(parts, self.momentum_P, self.lock, validation, self._begun)
        self._rounds = rounds
        return RoundLoop(parts, rounds, validation, start_trainer)

    async def serve(self) -> None:
        await self._begun.wait()
        assert self._rounds is not None
        assert self._rounds.exchange is not None
        await self._rounds.exchange.run()
