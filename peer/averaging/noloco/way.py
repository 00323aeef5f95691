"""NoLoCo, put together: whole models averaged by gossip in pairs."""

import numpy as np
import trio

from peer.averaging.gossip.door import GossipDoor
from peer.averaging.gossip.final_rounds import FinalRounds
from peer.averaging.gossip.gossip_rounds import GossipRounds
from peer.averaging.gossip.lane import lane_of
from peer.averaging.gossip.outer_state import OuterState
from peer.averaging.gossip.outer_step import NolocoFactors
from peer.averaging.gossip.outer_steps import MAX_EXCHANGE_ROUNDS
from peer.averaging.gossip.own_length import OwnLength
from peer.averaging.parts import AveragingParts
from peer.codec import get_codec
from peer.rounds.loop import RoundLoop
from peer.rounds.pace import Pace
from peer.training.ports import StartTrainer
from protocol.gossip.final_averaging import WAIT_ROUNDS
from protocol.schedule.own_rounds import OwnRounds


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
