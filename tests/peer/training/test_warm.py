"""A trainer that is ready before it is needed."""

from collections import deque
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio

from peer.training.messages import (
    Evaluate,
    Evaluated,
    Failed,
    Load,
    Ready,
    StepChosen,
    TrainerEvent,
)
from peer.training.ports import CannotTrain, TrainerDied
from peer.training.warm import warmed_up

SLOW = np.zeros(128, np.float32)
READY = Ready("cpu", "fp32", 1, 1.0)


class Trainers:
    """Starts trainers that say READY, and knows which live."""

    def __init__(self, dying: int = 0, first: TrainerEvent = READY) -> None:
        self.started, self.living = 0, 0
        self.dying, self.first = dying, first
        self.sent: list[object] = []
        self.answers: deque[TrainerEvent | TrainerDied] = deque()

    @asynccontextmanager
    async def start(self, _, micro_batch_cap):
        self.started += 1
        self.living += 1
        number = self.started
        said: list[TrainerEvent] = []
        trainers = self

        class One:
            async def send(self, command):
                trainers.sent.append((number, command))
                await trio.lowlevel.checkpoint()

            async def receive(self):
                if number <= trainers.dying:
                    raise TrainerDied("killed")
                if said and trainers.answers:
                    if isinstance(answer := trainers.answers.popleft(), TrainerDied):
                        raise answer
                    return answer
                assert not said, "an event is given once"
                said.append(trainers.first)
                return trainers.first

            def codes(self, slot):
                return memoryview(bytes([number, slot]))

        try:
            yield One()
        finally:
            self.living -= 1


async def test_the_first_is_there_before_it_is_asked_for_and_goes_before_the_next():
    trainers = Trainers()
    async with warmed_up(trainers.start, SLOW) as warm:
        assert (trainers.started, trainers.living) == (1, 1)
        async with warm.start(SLOW, None) as first:
            assert await first.receive() == READY
            await first.send(Load())
            assert first.codes(7).tolist() == [1, 7]
            assert trainers.started == 1
        assert trainers.living == 0
        async with warm.start(SLOW, 4) as second:
            assert await second.receive() == READY
            assert (trainers.started, trainers.living) == (2, 1)
    assert trainers.living == 0
    assert trainers.sent == [(1, Load())]


async def test_one_that_is_never_asked_for_ends():
    trainers = Trainers()
    async with warmed_up(trainers.start, SLOW):
        assert trainers.living == 1
    assert trainers.living == 0


async def test_one_that_dies_early_is_forgotten():
    trainers = Trainers(dying=1)
    async with warmed_up(trainers.start, SLOW) as warm:
        assert (trainers.started, trainers.living) == (1, 0)
        async with warm.start(SLOW, None) as second:
            assert await second.receive() == READY


@pytest.mark.parametrize("reason", ["unusable", "out_of_memory", "error"])
async def test_only_what_no_new_try_can_change_ends_it(reason):
    trainers = Trainers(first=Failed(reason, "why"))
    if reason == "unusable":
        with pytest.raises(CannotTrain, match="why"):
            async with warmed_up(trainers.start, SLOW):
                pytest.fail("it began")
    else:
        async with warmed_up(trainers.start, SLOW) as warm, warm.start(SLOW, None) as first:
            assert await first.receive() == Failed(reason, "why")
    assert trainers.living == 0


async def test_what_fails_in_its_life_is_told_and_it_ends():
    trainers = Trainers()
    async with warmed_up(trainers.start, SLOW) as warm:
        with pytest.raises(TrainerDied):
            async with warm.start(SLOW, None):
                raise TrainerDied("in mid-life")
        assert trainers.living == 0


MEASURED = Evaluated(-1, 2.5, 0.1)


async def test_the_one_at_hand_measures_the_slow_weights_before_it_trains():
    trainers = Trainers()
    async with warmed_up(trainers.start, SLOW) as warm:
        trainers.answers.append(MEASURED)
        assert await warm.loss() == 2.5
        assert trainers.sent == [(1, Evaluate(-1))]
        async with warm.start(SLOW, None) as first:
            assert await first.receive() == READY
        assert await warm.loss() is None


async def test_an_answer_to_a_question_that_was_cancelled_is_not_taken_for_that_to_the_next():
    trainers = Trainers()
    async with warmed_up(trainers.start, SLOW) as warm:
        with trio.CancelScope() as scope:
            scope.cancel()
            await warm.loss()
        trainers.answers.extend([MEASURED, Evaluated(-2, 1.5, 0.1)])
        assert await warm.loss() == 1.5


async def test_what_it_says_of_its_steps_while_it_measures_is_heard_when_it_trains():
    trainers, chosen = Trainers(), StepChosen(("not compiled",))
    async with warmed_up(trainers.start, SLOW) as warm:
        trainers.answers.extend([chosen, MEASURED])
        assert await warm.loss() == 2.5
        async with warm.start(SLOW, None) as first:
            assert [await first.receive(), await first.receive()] == [READY, chosen]


async def test_one_that_dies_while_it_measures_is_forgotten():
    trainers = Trainers()
    async with warmed_up(trainers.start, SLOW) as warm:
        trainers.answers.append(TrainerDied("killed"))
        assert await warm.loss() is None
        assert trainers.living == 0
        async with warm.start(SLOW, None) as second:
            assert await second.receive() == READY
        assert trainers.started == 2


async def test_an_answer_that_nobody_waits_for_any_more_is_not_taken_for_one_of_a_round():
    trainers = Trainers()
    later = Evaluated(3, 2.0, 0.1)
    async with warmed_up(trainers.start, SLOW) as warm:
        trainers.answers.extend([MEASURED, later])  # the question was asked, and cancelled
        async with warm.start(SLOW, None) as first:
            assert await first.receive() == READY
            assert await first.receive() == later
