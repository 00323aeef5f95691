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
"""

from functools import partial

import numpy as np
import trio

from peer.averaging.gossip.door import GossipDoor
from peer.averaging.gossip.final_rounds import FinalRounds, Meetings
from peer.averaging.gossip.outer_step import NolocoFactors
from peer.averaging.parts import AveragingParts
from peer.observe.status import PeerState
from peer.rounds.loop import RoundLoop
from peer.rounds.pace import Pace
from peer.rounds.validation import Validation
from peer.training.ports import StartTrainer
from protocol.fragment.fragments import fragments_of_run
from protocol.run.layout import Layout
from protocol.schedule.own_rounds import OwnRounds

from .fragment_lanes import FragmentLanes
from .streaming_rounds import StreamingRounds


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
