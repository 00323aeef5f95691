"""Validation of the slow weights: when it is due, and that nothing moves them meanwhile.

One validation at a time is under way, from the command to the trainer's answer; a slow peer, which
has to keep up, validates less often than the run asks for.
"""

import math
from typing import Final

import trio

from peer.observe.event_names import EventName
from peer.training.messages import Evaluate, Evaluated

from .surroundings import Surroundings
from .way import TrainerLine

MAX_VALIDATION_SHARE: Final = 0.02
"""Largest part of a peer's time that goes into validation: with frequent averages it is most of
what each costs (docs/results/optimizers.md)."""


class Validation:
    """Asks the trainer for the loss of the held-out blocks; `answers` counts its answers."""

    def __init__(self, every_rounds: int, around: Surroundings) -> None:
        self._every_rounds = every_rounds
        self._facts, self._events = around.facts, around.events
        self._idle = trio.Event()
        self._idle.set()
        self._not_before_s = -math.inf
        self.answers = 0

    @property
    def is_idle(self) -> bool:
        return self._idle.is_set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def is_due(self, round_: int, before: int | None = None) -> bool:
        """Whether to validate after this round; `before` is the one after which this was asked."""
        before = round_ - 1 if before is None else before
        due = round_ // self._every_rounds > before // self._every_rounds
        return due and self.is_idle and trio.current_time() >= self._not_before_s

    async def begin(self, line: TrainerLine, round_: int) -> None:
        """Have the slow weights measured; they must lie still from now on until it is idle."""
        self._idle = trio.Event()
        await line.send(Evaluate(round_))

    def ended(self, result: Evaluated) -> None:
        facts = self._facts
        self.answers += 1
        self._not_before_s = trio.current_time() + result.seconds / MAX_VALIDATION_SHARE
        if result.loss is not None:
            facts.count_validation(result.round, result.loss)
            self._events.emit(
                EventName.VALIDATED, round=result.round, loss=result.loss, seconds=result.seconds
            )
        self._idle.set()

    def forget(self) -> None:
        """Nobody is left to answer."""
        self._idle.set()
