"""A trainer that is ready before it is needed."""

from contextlib import asynccontextmanager

import numpy as np
import pytest

from peer.training.errors import CannotTrain
from peer.training.messages import Failed, Load, Ready, TrainerEvent
from peer.training.ports import TrainerDied
from peer.training.warm import warmed_up

SLOW = np.zeros(128, np.float32)
READY = Ready(128, 128, "digest", "cpu", "fp32", 1, 1.0)


class Trainers:
    """Starts trainers that say READY, and knows which live."""

    def __init__(self, dying: int = 0, first: TrainerEvent = READY) -> None:
        self.started, self.living = 0, 0
        self.dying, self.first = dying, first
        self.sent: list[object] = []

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

            async def receive(self):
                if number <= trainers.dying:
                    raise TrainerDied("killed")
                assert not said, "an event is given once"
                said.append(trainers.first)
                return trainers.first

            def codes(self, slot):
                return memoryview(bytes([number, slot]))

            def fragment_codes(self, fragment):
                return memoryview(bytes([number, fragment, 0]))

        try:
            yield One()
        finally:
            self.living -= 1


async def test_the_first_is_there_before_it_is_asked_for_and_goes_before_the_next():
    trainers = Trainers()
    async with warmed_up(trainers.start, SLOW) as start:
        assert (trainers.started, trainers.living) == (1, 1)
        async with start(SLOW, None) as first:
            assert await first.receive() == READY
            await first.send(Load(1))
            assert first.codes(7).tolist() == [1, 7]
            assert first.fragment_codes(2).tolist() == [1, 2, 0]
            assert trainers.started == 1
        assert trainers.living == 0
        async with start(SLOW, 4) as second:
            assert await second.receive() == READY
            assert (trainers.started, trainers.living) == (2, 1)
    assert trainers.living == 0
    assert trainers.sent == [(1, Load(1))]


async def test_one_that_is_never_asked_for_ends():
    trainers = Trainers()
    async with warmed_up(trainers.start, SLOW):
        assert trainers.living == 1
    assert trainers.living == 0


async def test_one_that_dies_early_is_forgotten():
    trainers = Trainers(dying=1)
    async with warmed_up(trainers.start, SLOW) as start:
        assert (trainers.started, trainers.living) == (1, 0)
        async with start(SLOW, None) as second:
            assert await second.receive() == READY


@pytest.mark.parametrize("reason", ["unusable", "out_of_memory", "error"])
async def test_only_what_no_new_try_can_change_ends_it(reason):
    trainers = Trainers(first=Failed(reason, "why"))
    if reason == "unusable":
        with pytest.raises(CannotTrain, match="why"):
            async with warmed_up(trainers.start, SLOW):
                pytest.fail("it began")
    else:
        async with warmed_up(trainers.start, SLOW) as start, start(SLOW, None) as first:
            assert await first.receive() == Failed(reason, "why")
    assert trainers.living == 0


async def test_what_fails_in_its_life_is_told_and_it_ends():
    trainers = Trainers()
    async with warmed_up(trainers.start, SLOW) as start:
        with pytest.raises(TrainerDied):
            async with start(SLOW, None):
                raise TrainerDied("in mid-life")
        assert trainers.living == 0
