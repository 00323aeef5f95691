"""The two ways of averaging, each put together from its parts; the peer need not know which it has.

Each has two vectors, the slow weights and an outer momentum, which are what a joiner takes over; a
lock under which they move; rounds, which drive the trainer; and something that serves other peers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import trio

from peer.averaging.diloco.fragment_rounds import FragmentMeans, FragmentRounds
from peer.averaging.gossip.company import Company
from peer.averaging.gossip.exchanges import Exchanges
from peer.averaging.gossip.final_meetings import FinalMeetings
from peer.averaging.gossip.final_rounds import FinalRounds
from peer.averaging.gossip.gossip import Gossip
from peer.averaging.gossip.gossip_rounds import GossipRounds
from peer.averaging.gossip.outcome import Agreement
from peer.averaging.gossip.outer_state import Factors, OuterState
from peer.averaging.gossip.outer_steps import OuterSteps, RoundTiming
from peer.codec import get_codec
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.observe.status import PeerState
from peer.ports import Network, Work
from peer.rounds.loop import RoundLoop
from peer.rounds.pace import Pace
from peer.rounds.shares import DataShares
from peer.rounds.validation import Validation
from peer.rounds.way import Way
from peer.training.ports import Float32Vector, StartTrainer
from protocol.membership.records import Sign
from protocol.outcomes import RefusalReason
from protocol.run.run_spec import RunSpec
from protocol.schedule.own_rounds import OwnRounds

from .held_part import HeldPart


@dataclass(frozen=True, slots=True)
class AveragingParts:
    """What both ways are put together from.

    Attributes:
        held: what belongs to our group.
        slow_P: memory for the slow weights.
    """

    spec: RunSpec
    held: HeldPart
    slow_P: Float32Vector
    facts: Facts
    company: Company
    shares: DataShares
    network: Network
    work: Work
    sign: Sign
    events: EventLog
    observe_round: Callable[[RoundTiming], None]

    def validation(self) -> Validation:
        """Of the slow weights, as often as the run asks for."""
        return Validation(self.spec.sync.validate_every, self.facts, self.events)

    def loop(self, way: Way, validation: Validation, start_trainer: StartTrainer) -> RoundLoop:
        """The rounds of this way of averaging."""
        spec = self.spec
        return RoundLoop(
            way,
            inner_steps=spec.sync.inner_steps,
            total_steps=spec.total_rounds * spec.sync.inner_steps,
            facts=self.facts,
            view=self.held.view,
            shares=self.shares,
            validation=validation,
            slow_P=self.slow_P,
            start_trainer=start_trainer,
            events=self.events,
        )


class Averaging(Protocol):
    """A way of averaging, before and while rounds run.

    Attributes:
        slow_P, momentum_P: fp32 [P].
        lock: held while they move.
    """

    slow_P: Float32Vector
    momentum_P: Float32Vector
    lock: trio.Lock

    @property
    def round(self) -> int:
        """Of the last outer step; -1 before the first."""

    @property
    def senders(self) -> int:
        """Peers that send us their weights at the same time."""

    def arrived(self, round_: int) -> None:
        """A joiner's vectors are whole, as they stood after this round."""

    def begin(self, start_trainer: StartTrainer) -> RoundLoop:
        """The rounds."""

    async def serve(self) -> None:
        """Serve other peers until cancelled."""


def averaging_of(parts: AveragingParts) -> Averaging:
    """The way that the run spec names."""
    if parts.spec.sync.method == "diloco":
        return FragmentAveraging(parts)
    return PairAveraging(parts)


def declined_in(state: PeerState) -> RefusalReason | None:
    """Why a peer takes no proposal in this state; None when it does."""
    if state is PeerState.LEAVING:
        return RefusalReason.LEAVING
    return None if state is PeerState.TRAINING else RefusalReason.NOT_TRAINING


class PairAveraging:
    """NoLoCo."""

    def __init__(self, parts: AveragingParts) -> None:
        sync, held = parts.spec.sync, parts.held
        self._parts = parts
        self._outer = OuterState(
            parts.slow_P,
            np.zeros_like(parts.slow_P),
            get_codec(held.codec),
            Factors(sync.alpha, sync.beta, sync.effective_gamma),
        )
        agreement = Agreement(
            group=held.group.digest,
            inner_steps=sync.inner_steps,
            layout_digest=held.shape.layout_digest,
            codec=held.codec,
            vectors=2 if self._outer.needs_phi_codes else 1,
            padded_parameters=held.shape.padded_parameters,
            declined_now=lambda: declined_in(parts.facts.state),
        )
        exchanges = Exchanges(agreement, parts.network, parts.work)
        self._meetings = FinalMeetings(
            agreement,
            parts.network.peer_id,
            company=parts.company,
            exchanges=exchanges,
            events=parts.events,
        )
        self._gossip = Gossip(
            agreement,
            company=parts.company,
            network=parts.network,
            exchanges=exchanges,
            meetings=self._meetings,
            events=parts.events,
            refused=parts.facts.refused,
        )
        self._steps = OuterSteps(
            parts.spec,
            facts=parts.facts,
            outer=self._outer,
            gossip=self._gossip,
            meetings=self._meetings,
            work=parts.work,
            events=parts.events,
            observe_round=parts.observe_round,
        )
        self.slow_P, self.momentum_P = self._outer.phi_P, self._outer.delta_P
        self.lock = self._steps.lock

    def __repr__(self) -> str:
        return f"<PairAveraging {self._outer!r}>"

    @property
    def round(self) -> int:
        """Of the last outer step; -1 before the first."""
        return self._outer.round

    @property
    def senders(self) -> int:
        """A partner."""
        return 1

    def arrived(self, round_: int) -> None:
        """A joiner's vectors are whole, as they stood after this round."""
        self._outer.arrived(round_)

    def begin(self, start_trainer: StartTrainer) -> RoundLoop:
        """The rounds."""
        parts, validation = self._parts, self._parts.validation()
        sync, facts = parts.spec.sync, parts.facts
        total_steps = parts.spec.total_rounds * sync.inner_steps
        finale = FinalRounds(
            wanted=sync.final_averaging,
            facts=facts,
            view=parts.held.view,
            company=parts.company,
            held=self._meetings,
            validation=validation,
            events=parts.events,
        )
        way = GossipRounds(
            OwnRounds(sync.inner_steps, total_steps, facts.round, facts.nominal_step),
            Pace(sync.inner_steps, facts),
            overlap=sync.overlap,
            outer=self._outer,
            steps=self._steps,
            finale=finale,
            validation=validation,
        )
        return parts.loop(way, validation, start_trainer)

    async def serve(self) -> None:
        """Answer proposals until cancelled."""
        await self._gossip.run()


class FragmentAveraging:
    """Streaming DiLoCo."""

    def __init__(self, parts: AveragingParts) -> None:
        self._parts = parts
        self.slow_P, self.momentum_P = parts.slow_P, np.zeros_like(parts.slow_P)
        self._rounds: FragmentRounds | None = None
        self._joined = False
        self._begun = trio.Event()
        self.lock = trio.Lock()

    def __repr__(self) -> str:
        return f"<FragmentAveraging {self._rounds!r}>"

    @property
    def round(self) -> int:
        """The last that is over; fragments are stepped within rounds."""
        facts = self._parts.facts
        return facts.round if facts.state is PeerState.FINISHED else facts.round - 1

    @property
    def senders(self) -> int:
        """All the others, once there are rounds: who has finished still heals us."""
        if self._rounds is None:
            return 1
        return len(self._parts.held.view.alive(trio.current_time()))

    def arrived(self, round_: int) -> None:
        """A joiner's vectors are whole. What each chunk lacks since, it heals."""
        self._joined = True

    def begin(self, start_trainer: StartTrainer) -> RoundLoop:
        """The rounds."""
        parts, validation = self._parts, self._parts.validation()
        self._rounds = FragmentRounds(
            parts.spec,
            facts=parts.facts,
            view=parts.held.view,
            slow_P=parts.slow_P,
            momentum_P=self.momentum_P,
            lock=self.lock,
            joined=self._joined,
            validation=validation,
            means=FragmentMeans(
                network=parts.network,
                work=parts.work,
                sign=parts.sign,
                events=parts.events,
                observe_round=parts.observe_round,
            ),
        )
        self._begun.set()
        return parts.loop(self._rounds, validation, start_trainer)

    async def serve(self) -> None:
        """Average with the others until cancelled."""
        await self._begun.wait()
        assert self._rounds is not None
        await self._rounds.serve()
