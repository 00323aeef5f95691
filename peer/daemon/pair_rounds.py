"""Rounds of NoLoCo: each closed round is averaged with one partner while the next one is trained.

    trainer   |---- round r ----|---- round r+1 ----------|----
    here                        | match, exchange, outer step, Apply |

- A round is opened when the one before is closed (overlap), or when that one is settled (no
  overlap, final rounds).
- At most one round is being settled; the next is not settled before that.
- An exchange under way when the trainer dies is finished: its codes lie in memory that outlives the
  trainer.
"""

from typing import Any

import trio

from peer.averaging.gossip import Gossip
from peer.averaging.outer_state import OuterState
from peer.training.messages import Apply, Ready, RoundClosed, SyncEvent
from peer.training.ports import Trainer, TrainerDied

from .outer_steps import OuterSteps
from .rounds import RoundLoop


class PairRounds(RoundLoop):
    """See the top of the file."""

    def __init__(
        self, *args: Any, outer: OuterState, steps: OuterSteps, gossip: Gossip, **kwargs: Any
    ) -> None:
        super().__init__(*args, slow_P=outer.phi_P, **kwargs)
        self._outer = outer
        self._steps = steps
        self._gossip = gossip
        gossip.close_early = self.close_early
        self._settled = trio.Event()
        self._settled.set()
        self._final_rounds_averaged: list[bool] = []

    @property
    def _version(self) -> int:
        return self._outer.version

    @property
    def _num_rounds(self) -> int:
        return self._spec.total_rounds + self._spec.sync.final_rounds

    def _on_ready(self, ready: Ready) -> None:
        pass

    def _on_opened(self, round_: int) -> None:
        self._gossip.round_opened(round_)

    def _on_progress(self) -> None:
        self._gossip.round_progressed(self._facts.fraction)

    async def _on_closed(self, closed: RoundClosed, following: int, *, jumped: bool) -> None:
        await self._settled.wait()  # it is: no round is closed before the last is applied
        self._settled = trio.Event()
        waits = not self._spec.sync.overlap or following >= self._spec.total_rounds
        assert self._nursery is not None
        self._nursery.start_soon(self._settle, closed, jumped, following if waits else None)
        if not waits:
            await self._open(following)

    async def _on_event(self, event: SyncEvent) -> None:
        pass

    async def _on_death(self) -> None:
        await self._settled.wait()  # an exchange under way needs no trainer

    async def wait_settled(self) -> None:
        """Wait until no exchange is under way."""
        await self._settled.wait()

    def _check_end(self) -> None:
        """Raises JoinAgain when the others' final averaging was over before ours began."""
        if self._final_rounds_averaged and not any(self._final_rounds_averaged):
            self._join_the_finished()

    # --- settling a closed round ------------------------------------------------------------------
    async def _settle(self, closed: RoundClosed, jumped: bool, then: int | None) -> None:
        """Average and apply a closed round, and open round `then` if it had to wait for that."""
        trainer, averaged_before = self._trainer, self._facts.averaged
        assert trainer is not None
        try:
            averaging = await self._steps.average(trainer, closed, jumped=jumped)
            await self._evaluated.wait()  # the slow weights lie still while they are validated
            await self._steps.take(averaging)
            if closed.round >= self._spec.total_rounds:
                self._final_rounds_averaged.append(self._facts.averaged > averaged_before)
            await self._hand_over(trainer, closed.round)
        finally:
            self._gossip.round_settled(closed.round)
            self._settled.set()
        if then is not None and self._trainer is trainer:
            await self._open_or_finish(then)

    async def _hand_over(self, trainer: Trainer, round_: int) -> None:
        try:
            await trainer.send(Apply(round_))
            if self._validation_due(round_):
                await self._evaluate(trainer, round_)
        except TrainerDied:
            self._evaluated.set()  # whoever waits for its events learns of it
