"""A trainer that is started before it is needed.

A trainer takes seconds to start, and a swarm trains on meanwhile. So a joiner fetches the state
when its trainer is ready: the state is then as new as it can be. And a machine that cannot train at
all finds out before other peers count on it.

Until it trains, it tells the validation loss of the slow weights, so that a state that was fetched
is checked before it is used.
"""

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from protocol.content.samples import Float32Vector

from .messages import Evaluate, Evaluated, Failed, TrainerCommand, TrainerEvent
from .ports import CannotTrain, StartTrainer, Trainer, TrainerDied
from .shared import BoundaryRing


class _Heard:
    """A trainer whose first events were taken, and are given again. Implements `Trainer`."""

    def __init__(self, trainer: Trainer, first: TrainerEvent) -> None:
        self._trainer = trainer
        self._first = [first]
        self._questions = itertools.count(-1, -1)  # before all rounds

    @property
    def boundaries(self) -> BoundaryRing | None:
        return self._trainer.boundaries

    async def send(self, command: TrainerCommand) -> None:
        await self._trainer.send(command)

    async def receive(self) -> TrainerEvent:
        if self._first:
            return self._first.pop(0)
        while True:
            event = await self._trainer.receive()
            if not isinstance(event, Evaluated) or event.round >= 0:
                return event  # else it answers a question that was cancelled

    async def loss(self) -> float | None:
        """The validation loss of the slow weights. Raises TrainerDied."""
        question = Evaluate(next(self._questions))
        await self._trainer.send(question)
        while True:  # the answer to a question that was cancelled may come first
            event = await self._trainer.receive()
            if not isinstance(event, Evaluated):
                self._first.append(event)
            elif event.round == question.round:
                return event.loss

    def codes(self, region: int) -> memoryview:
        return self._trainer.codes(region)


class WarmTrainer:
    """Starts trainers, of which one may be at hand. Made by `warmed_up`."""

    def __init__(self, start: StartTrainer, at_hand: list[_Heard], stack: AsyncExitStack) -> None:
        self._start = start
        self._at_hand = at_hand
        self._stack = stack

    @asynccontextmanager
    async def start(
        self, vector: Float32Vector, micro_batch_cap: int | None
    ) -> AsyncIterator[Trainer]:
        """The trainer at hand, at the first call; another one later."""
        if self._at_hand:
            try:
                yield self._at_hand.pop()
            finally:
                await self._stack.aclose()
        else:
            async with self._start(vector, micro_batch_cap) as trainer:
                yield trainer

    async def loss(self) -> float | None:
        """Validation loss of the slow weights, nats per token; None without a trainer at hand."""
        if not self._at_hand:
            return None
        try:
            return await self._at_hand[0].loss()
        except TrainerDied:
            self._at_hand.clear()
            await self._stack.aclose()
            return None


@asynccontextmanager
async def warmed_up(start: StartTrainer, slow: Float32Vector) -> AsyncIterator[WarmTrainer]:
    """Start a trainer and wait until it is ready; one that dies before is forgotten.

    Raises CannotTrain.
    """
    async with AsyncExitStack() as stack:
        at_hand: list[_Heard] = []
        try:
            trainer = await stack.enter_async_context(start(slow, None))
            first = await trainer.receive()
            if isinstance(first, Failed) and first.reason == "unusable":
                raise CannotTrain(f"the trainer cannot start: {first.detail}")
            at_hand.append(_Heard(trainer, first))
        except TrainerDied:
            await stack.aclose()
        yield WarmTrainer(start, at_hand, stack)
