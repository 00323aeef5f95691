"""Rounds of Streaming DiLoCo: they pace data and schedule; averaging goes on beside them.

A round is opened as soon as the one before is closed. The trainer sends each fragment at its moment
of the round; what comes of it is the business of the exchange (fragment_exchange.py), which has the
trainer's side in current_trainer.py.

The last round trains nothing: every fragment that has not been sent since the last inner step is
sent once more, and the run is over when all are back. All sends after that step, and no others, are
of the cycle `total_rounds` (the fragment that goes at the end of a round has made its own by then).
That cycle is averaged plainly, so a run ends with the mean of all peers' weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from peer.averaging.diloco.current_trainer import CurrentTrainer
from peer.averaging.diloco.fragment_company import FragmentCompany
from peer.averaging.diloco.fragment_exchange import FragmentExchange
from peer.averaging.diloco.fragment_record import FragmentRecord
from peer.averaging.diloco.nesterov import NesterovFactors
from peer.averaging.diloco.outer_fragments import OuterFragments
from peer.averaging.diloco.surroundings import FragmentSurroundings, KeptProofs
from peer.codec import get_codec
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.observe.timing import RoundTiming
from peer.ports import Network, PeerId, Work
from peer.process.rejoin import join_the_finished
from peer.rounds.pace import Pace
from peer.rounds.validation import Validation
from peer.rounds.way import TrainerLine
from peer.training.messages import (
    FragmentMerged,
    FragmentSent,
    Progress,
    Ready,
    RoundClosed,
    SyncEvent,
    Yielded,
)
from peer.training.ports import Float32Vector
from protocol.diloco.fragment_events import Sent
from protocol.fragment.fragments import fragments_of_run, last_sent
from protocol.membership.records import Sign
from protocol.membership.view import Member, View
from protocol.run.amendments import AmendedSpec
from protocol.run.layout import Layout
from protocol.schedule.own_rounds import RoundPlan
from protocol.schedule.rounds import (
    Quotas,
    catch_up,
    is_left_behind,
    middle,
    next_round,
)


@dataclass(frozen=True, slots=True)
class FragmentMeans:
    """The means by which fragments are averaged, and told of.

    Attributes:
        convict: bans a peer that was proved to have lied.
        proofs: of that, kept in the home.
    """

    network: Network
    work: Work
    sign: Sign
    events: EventLog
    observe_round: Callable[[RoundTiming], None]
    convict: Callable[[PeerId], None]
    proofs: KeptProofs


class FragmentRounds:
    """See the top of the file. `serve` must be running. Implements `peer.rounds.way.Way`.

    Args:
        momentum_P: v, in the order of the flat vector.
        lock: held while slow weights and momentum move.
    """

    def __init__(
        self,
        spec: AmendedSpec,
        *,
        facts: Facts,
        view: View,
        slow_P: Float32Vector,
        momentum_P: Float32Vector,
        lock: trio.Lock,
        validation: Validation,
        means: FragmentMeans,
    ) -> None:
        self._amended, self._spec = spec, spec.founding
        self._facts = facts
        self._view = view
        self._slow_P = slow_P
        self._momentum_P = momentum_P
        self._lock = lock
        self._validation = validation
        self._means = means
        self._pace = Pace(self._spec.sync.round_steps, facts)
        self._quotas = Quotas()
        self._next_round = facts.round
        self._last_trained = -1
        self._company = FragmentCompany(means.network.peer_id, facts, view, spec)
        self._record = FragmentRecord(facts, means.events, self._company, spec, means.convict)
        self._trainer = CurrentTrainer(validation)
        self._exchange: FragmentExchange | None = None
        self._begun = trio.Event()

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
        """Go on with the round that the others are in, if they are ahead."""
        theirs = middle(self._heard_rounds(others), self._next_round)
        self._next_round = max(self._next_round, int(theirs))

    def next_round(self, others: Sequence[Member]) -> RoundPlan | None:
        """The next round of training; None when the training is over."""
        round_, inner_steps = self._next_round, self._spec.sync.round_steps
        if round_ >= self._amended.at_round(round_).total_rounds:
            return None
        step = float(round_ * inner_steps)
        quota = self._quotas.next(self._pace.owed(step, others, catch_up))
        return RoundPlan(round_, quota, step, inner_steps / quota)

    def closes_early(self, others: Sequence[Member]) -> bool:
        """Whether the others are in a newer round."""
        return is_left_behind(self._facts.round, self._heard_rounds(others))

    async def next_final_round(self) -> RoundPlan | None:
        """One more without steps, which sends what has not been sent; then all must be back.

        Raises:
            JoinAgain: the others have ended the run without us.
        """
        total = self._amended.at_round(self._next_round).total_rounds
        if self._next_round <= total:
            return RoundPlan(total, 0, float(total * self._spec.sync.round_steps), 1.0)
        await self._trainer.wait_all_back()
        heard_too_late = self._last_trained >= total  # of an amendment that has shortened the run
        if self._record.ended_alone or heard_too_late:
            join_the_finished(self._view.alive(trio.current_time()))
        return None

    def _heard_rounds(self, others: Sequence[Member]) -> list[int]:
        """But for those that say they are past the end, where nobody can be."""
        rounds = (member.progress.round for member in others)
        return [round_ for round_ in rounds if round_ <= self._amended.longest_rounds]

    # --- what happens to them ---------------------------------------------------------------------
    def began(self, line: TrainerLine, ready: Ready) -> None:
        """A trainer has started; the first one tells the layout."""
        self._trainer.began(line)
        if self._exchange is None:
            self._exchange = self._new_exchange(Layout.from_shapes(dict(ready.shapes)))
            self._begun.set()

    def progressed(self, progress: Progress) -> None:
        """The trainer has taken what it loaded."""
        self._trainer.loaded()

    async def closed(self, closed: RoundClosed, others: Sequence[Member]) -> None:
        """Validate if it is due; the next round may begin at once."""
        self._trainer.loaded()
        self._means.observe_round(RoundTiming(closed.seconds, 0.0, 0.0, 0.0))
        if self._validation.is_due(closed.round):
            async with self._lock:  # nothing is half written
                await self._validation.begin(self._trainer.line, closed.round)
        if closed.steps:
            self._last_trained = closed.round
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
            NesterovFactors(sync.diloco.learning_rate, sync.diloco.momentum),
            is_last=self._amended.is_last_round,
        )
        around = FragmentSurroundings(
            group=held.group.digest,
            incarnation=self._facts.incarnation,
            network=self._means.network,
            work=self._means.work,
            sign=self._means.sign,
            company=self._company,
            trainer=self._trainer,
            record=self._record,
            conduct=self._record,
            proofs=self._means.proofs,
            lock=self._lock,
            refused=self._facts.refused,
            inner_steps=sync.round_steps,
            trims=sync.diloco.robust == "trim",
            last_sent=[
                last_sent(index, len(fragments), sync.round_steps, self._next_round)
                for index in range(len(fragments))
            ],
        )
        return FragmentExchange(around, outer)

    async def took(self, event: SyncEvent) -> None:
        """A fragment was sent, merged or yielded."""
        self._trainer.loaded()
        match event:
            case FragmentSent():
                self._sent(event)
            case FragmentMerged():
                self._facts.stalled_s += event.waited_s
            case Yielded(fragment):
                self._trainer.yielded(fragment)

    def _sent(self, event: FragmentSent) -> None:
        assert self._exchange is not None
        self._trainer.sent(event)
        codes = self._trainer.line.trainer.fragment_codes(event.fragment)
        self._exchange.sent(Sent(event.fragment, event.cycle, codes, event.steps, event.tokens))

    async def died(self) -> None:
        """Nothing is in flight any more."""
        self._trainer.died()

    def leave(self) -> None:
        """Nothing to do: an exchange begins with a round, or with a fragment, that ends."""

    async def wait_settled(self) -> None:
        """Wait until no send is under way."""
        await self._trainer.wait_all_back()
