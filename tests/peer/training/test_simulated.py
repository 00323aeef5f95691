"""The simulated trainer keeps the conversation of messages.py, in virtual time."""

import dataclasses
from typing import Any, TypeVar

import numpy as np
import pytest
import trio
from existing import existing
from trio.testing import MockClock

from peer.training.messages import (
    CloseRound,
    Evaluate,
    Evaluated,
    Failed,
    Load,
    Ready,
    RoundClosed,
    TrainerEvent,
    TrainerProgress,
    TrainRound,
)
from peer.training.ports import Trainer, TrainerDied
from protocol.run.run_spec import RunSpec
from protocol.trainer_messages import ONE_CHUNK, FragmentMerged, FragmentSent, Merge
from simulation.trainer import SimulatedSpeed, simulated_starter

Event = TypeVar("Event", bound=TrainerEvent)

SPEC = RunSpec()
MEMBERS = (("me", 1),)


async def _after_progress(trainer: Trainer) -> TrainerEvent:
    """The next event that is no `Progress`."""
    while isinstance(event := await trainer.receive(), TrainerProgress):
        pass
    return event


async def _next(trainer: Trainer, kind: type[Event]) -> Event:
    while not isinstance(event := await trainer.receive(), kind):
        assert not isinstance(event, Failed)
    return event


async def test_scattered_steps_take_as_long_as_their_machine_says(
    autojump_clock: MockClock,
) -> None:
    speed = SimulatedSpeed(step_s=0.5, scatter=0.25, stretch_steps=4, scatter_seed=7)
    durations_s = [speed.duration_s(step) for step in range(400)]
    assert len(set(durations_s[:4])) == 1
    assert durations_s[3] != durations_s[4]
    assert np.mean(durations_s) == pytest.approx(0.5, rel=0.1)
    assert durations_s[0] != dataclasses.replace(speed, scatter_seed=8).duration_s(0)
    slow = np.zeros(256, np.float32)
    async with simulated_starter(SPEC, "me", speed)(slow, None) as trainer:
        await trainer.receive()
        await trainer.send(Load())
        began_s = trio.current_time()
        await trainer.send(TrainRound(0, 10, MEMBERS, 0, 0, 0.0, 1.0))
        await _next(trainer, RoundClosed)
        assert trio.current_time() - began_s == pytest.approx(sum(durations_s[:10]))


async def test_a_round_takes_its_steps_and_no_longer(autojump_clock: MockClock) -> None:
    slow = np.zeros(256, np.float32)
    async with simulated_starter(SPEC, "me", SimulatedSpeed(step_s=0.5))(slow, None) as trainer:
        ready = await trainer.receive()
        assert isinstance(ready, Ready)
        assert ready.steps_per_s == 2
        await trainer.send(Load())
        began_s = trio.current_time()
        await trainer.send(TrainRound(0, 10, MEMBERS, 0, 0, 0.0, 1.0))
        for steps in range(1, 11):
            progress = await trainer.receive()
            assert isinstance(progress, TrainerProgress)
            assert progress.steps == steps
        assert isinstance(await trainer.receive(), FragmentSent)
        closed = await trainer.receive()
        assert isinstance(closed, RoundClosed)
        assert (closed.steps, closed.round) == (10, 0)
        assert trio.current_time() - began_s == pytest.approx(5.0)
        assert closed.position == 10 * SPEC.training.batch_size


async def test_a_pending_snapshot_keeps_the_next_round_open(autojump_clock: MockClock) -> None:
    slow = np.zeros(256, np.float32)
    async with simulated_starter(SPEC, "me")(slow, None) as trainer:
        await trainer.receive()
        await trainer.send(Load())
        await trainer.send(TrainRound(0, 10, MEMBERS, 0, 0, 0.0, 1.0))
        await _next(trainer, RoundClosed)
        await trainer.send(TrainRound(1, 10, MEMBERS, 0, 80, 0.0, 1.0))
        await _next(trainer, TrainerProgress)
        with trio.move_on_after(3):
            await _after_progress(trainer)
            pytest.fail("the round was closed while a snapshot was pending")
        await trainer.send(Merge(0, 0, ONE_CHUNK, ()))
        assert isinstance(await _after_progress(trainer), FragmentMerged)
        assert isinstance(await _after_progress(trainer), FragmentSent)
        closed = await _after_progress(trainer)
        assert isinstance(closed, RoundClosed)
        assert closed.steps > 10


async def test_without_overlap_nothing_is_trained_in_flight(
    autojump_clock: MockClock,
) -> None:
    blocking = SPEC.model_copy(update={"sync": SPEC.sync.model_copy(update={"overlap": False})})
    slow = np.zeros(256, np.float32)
    async with simulated_starter(blocking, "me")(slow, None) as trainer:
        await trainer.receive()
        await trainer.send(Load())
        await trainer.send(TrainRound(0, 4, MEMBERS, 0, 0, 0.0, 1.0))
        await _next(trainer, RoundClosed)
        await trainer.send(TrainRound(1, 4, MEMBERS, 0, 32, 0.0, 1.0))
        await trio.sleep(10)
        await trainer.send(Merge(0, 0, ONE_CHUNK, ()))
        merged_s = trio.current_time()
        closed = await _next(trainer, RoundClosed)
        assert isinstance(closed, RoundClosed)
        assert closed.steps == 4
        assert trio.current_time() - merged_s == pytest.approx(0.4)


async def test_close_round_ends_it_with_the_step_in_progress(autojump_clock: MockClock) -> None:
    slow = np.zeros(256, np.float32)
    async with simulated_starter(SPEC, "me", SimulatedSpeed(step_s=1.0))(slow, None) as trainer:
        await trainer.receive()
        await trainer.send(Load())
        await trainer.send(TrainRound(0, 10, MEMBERS, 0, 0, 0.0, 1.0))
        await trio.sleep(6.5)
        await trainer.send(CloseRound(0))
        closed = await _next(trainer, RoundClosed)
        assert isinstance(closed, RoundClosed)
        assert closed.steps == 7
        assert closed.seconds == 7.0


@pytest.mark.parametrize(
    ("field", "reason"),
    [("non_finite_at_steps", "non_finite"), ("out_of_memory_at_steps", "out_of_memory")],
)
async def test_planned_failures_are_reported_and_end_the_life(
    autojump_clock: MockClock, field: str, reason: str
) -> None:
    slow = np.zeros(256, np.float32)
    planned: dict[str, Any] = {field: frozenset({3})}
    speed = SimulatedSpeed(**planned)
    start = simulated_starter(SPEC, "me", speed)
    async with start(slow, None) as trainer:
        await trainer.receive()
        await trainer.send(Load())
        await trainer.send(TrainRound(0, 10, MEMBERS, 0, 0, 0.0, 1.0))
        failed = await _after_progress(trainer)
        assert isinstance(failed, Failed)
        assert failed.reason == reason
        with pytest.raises(TrainerDied):
            await trainer.receive()
    async with start(slow, None) as trainer:  # the next life gets past that step
        await trainer.receive()
        await trainer.send(Load())
        await trainer.send(TrainRound(0, 10, MEMBERS, 0, 0, 0.0, 1.0))
        await _next(trainer, RoundClosed)


async def test_a_killed_trainer_says_so(autojump_clock: MockClock) -> None:
    slow = np.zeros(256, np.float32)
    speed = SimulatedSpeed(die_at_steps=frozenset({3}))
    async with simulated_starter(SPEC, "me", speed)(slow, None) as trainer:
        await trainer.receive()
        await trainer.send(Load())
        await trainer.send(TrainRound(0, 10, MEMBERS, 0, 0, 0.0, 1.0))
        with pytest.raises(TrainerDied, match="signal 9"):
            await _after_progress(trainer)
        with pytest.raises(TrainerDied):
            await trainer.send(Evaluate(0))


async def test_it_learns_and_repeats_itself(autojump_clock: MockClock) -> None:
    async def train() -> tuple[float, str | None]:
        slow = np.zeros(256, np.float32)
        async with simulated_starter(SPEC, "me")(slow, None) as trainer:
            await trainer.receive()
            await trainer.send(Load())
            await trainer.send(TrainRound(0, 100, MEMBERS, 0, 0, 0.0, 1.0))
            sent = await _next(trainer, FragmentSent)
            assert isinstance(sent, FragmentSent)
            closed = await _next(trainer, RoundClosed)
            assert isinstance(closed, RoundClosed)
            await trainer.send(Evaluate(0))
            before = await _next(trainer, Evaluated)
            assert isinstance(before, Evaluated)
            return existing(before.loss) - closed.loss, sent.digest

    first, second = await train(), await train()
    assert first == second
    assert first[0] > 0.1
