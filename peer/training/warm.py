"""A trainer that is started before it is needed.

A trainer takes seconds to start, and a swarm trains on meanwhile. So a joiner starts its trainer
first and fetches the state when that is ready: what it then loads is as new as it can be. And who
cannot train at all finds out before anybody counts on it.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from .errors import CannotTrain
from .messages import Failed, TrainerCommand, TrainerEvent
from .ports import Float32Vector, StartTrainer, Trainer, TrainerDied
from .stages.ring import BoundaryRing


class _Heard:
    """A trainer whose first event was taken already, and is given again."""

    def __init__(self, trainer: Trainer, first: TrainerEvent) -> None:
        self._trainer = trainer
        self._first: TrainerEvent | None = first

    def __repr__(self) -> str:
        return f"<_Heard {self._trainer!r}>"

    @property
    def boundaries(self) -> BoundaryRing | None:
        """What goes to other stages, or came from them."""
        return self._trainer.boundaries

    async def send(self, command: TrainerCommand) -> None:
        """Raises TrainerDied."""
        await self._trainer.send(command)

    async def receive(self) -> TrainerEvent:
        """The next event, in order. Raises TrainerDied."""
        first, self._first = self._first, None
        return await self._trainer.receive() if first is None else first

    def codes(self, slot: int) -> memoryview:
        """Codes of the snapshot in `slot`."""
        return self._trainer.codes(slot)

    def fragment_codes(self, fragment: int) -> memoryview:
        """Codes of the fragment's last send."""
        return self._trainer.fragment_codes(fragment)


@asynccontextmanager
async def warmed_up(start: StartTrainer, slow: Float32Vector) -> AsyncIterator[StartTrainer]:
    """Start a trainer and wait until it is ready; then yield a StartTrainer that has it at hand.

    Its first call gives that trainer, later ones start others. One that dies before it is ready is
    forgotten: whoever needs a trainer starts the next, and sees for itself.

    Raises:
        CannotTrain: device, corpus or model cannot be used here.
    """
    async with AsyncExitStack() as stack:
        waiting: list[Trainer] = []
        try:
            trainer = await stack.enter_async_context(start(slow, None))
            first = await trainer.receive()
            if isinstance(first, Failed) and first.reason == "unusable":
                raise CannotTrain(f"the trainer cannot start: {first.detail}")
            waiting.append(_Heard(trainer, first))
        except TrainerDied:
            await stack.aclose()

        @asynccontextmanager
        async def first_the_warm_one(
            vector: Float32Vector, micro_batch_cap: int | None
        ) -> AsyncIterator[Trainer]:
            if waiting:
                try:
                    yield waiting.pop()
                finally:
                    await stack.aclose()
            else:
                async with start(vector, micro_batch_cap) as trainer:
                    yield trainer

        yield first_the_warm_one
