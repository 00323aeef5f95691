"""Streaming DiLoCo, put together: fragments among all, and their rounds."""

import numpy as np
import trio

from peer.averaging.diloco.fragment_rounds import FragmentMeans, FragmentRounds
from peer.facts import PeerState
from peer.rounds.loop import RoundLoop
from peer.rounds.parts import AveragingParts
from peer.rounds.validation import Validation
from peer.training.ports import StartTrainer


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
        """The last that is over; fragments are stepped within rounds."""
        facts = self._parts.facts
        return facts.round if facts.state is PeerState.FINISHED else facts.round - 1

    @property
    def senders(self) -> int:
        """All the others, once there are rounds: one that has finished still heals us."""
        if self._rounds is None:
            return 1
        return len(self._parts.held.view.alive(trio.current_time()))

    def stands_after(self, round_: int) -> None:
        """The vectors hold our first state. What each chunk lacks since, it heals."""

    def begin(self, start_trainer: StartTrainer) -> RoundLoop:
        """The rounds."""
        parts = self._parts
        validation = Validation(parts.spec.sync.validate_every, parts.facts, parts.events)
        self._rounds = FragmentRounds(
            parts.amended,
            facts=parts.facts,
            view=parts.held.view,
            slow_P=parts.slow_P,
            momentum_P=self.momentum_P,
            lock=self.lock,
            validation=validation,
            means=FragmentMeans(
                network=parts.network,
                work=parts.work,
                sign=parts.sign,
                events=parts.events,
                observe_round=parts.observe_round,
                convict=parts.convict,
                proofs=parts.proofs,
            ),
        )
        self._begun.set()
        return RoundLoop(parts, self._rounds, validation, start_trainer)

    async def serve(self) -> None:
        """Average with the others until cancelled."""
        await self._begun.wait()
        assert self._rounds is not None
        await self._rounds.serve()
