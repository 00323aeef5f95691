"""Ways of averaging by gossip in pairs, put together: all that they share.

What tells one from another is the rule of its outer state (outer_state.py): how slow weights and
momentum move when two vectors have been exchanged.
"""

from peer.averaging.gossip.exchanges import Exchanges
from peer.averaging.gossip.final_meetings import FinalMeetings
from peer.averaging.gossip.final_rounds import FinalRounds
from peer.averaging.gossip.gossip import Gossip
from peer.averaging.gossip.gossip_rounds import GossipRounds
from peer.averaging.gossip.outcome import Agreement
from peer.averaging.gossip.outer_state import OuterState
from peer.averaging.gossip.outer_steps import OuterSteps
from peer.averaging.parts import AveragingParts
from peer.observe.status import PeerState
from peer.rounds.loop import RoundLoop
from peer.rounds.pace import Pace
from peer.training.ports import StartTrainer
from protocol.outcomes import RefusalReason
from protocol.schedule.own_rounds import OwnRounds


def declined_in(state: PeerState) -> RefusalReason | None:
    """Why a peer takes no proposal in this state; None when it does."""
    if state is PeerState.LEAVING:
        return RefusalReason.LEAVING
    return None if state is PeerState.TRAINING else RefusalReason.NOT_TRAINING


class PairAveraging:
    """A way of averaging by gossip. Implements `peer.averaging.parts.Averaging`.

    Args:
        outer: the outer state, whose step tells this way from others.
    """

    def __init__(self, parts: AveragingParts, outer: OuterState) -> None:
        sync, held = parts.spec.sync, parts.held
        self._parts = parts
        self._outer = outer
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
        self.slow_P, self.momentum_P = outer.phi_P, outer.delta_P
        self.lock = self._steps.lock

    def __repr__(self) -> str:
        return f"<PairAveraging {self._outer!r}>"

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
            OwnRounds(
                facts.peer_id, sync.inner_steps, total_steps, facts.round, facts.nominal_step
            ),
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
