"""The simulated trainer sends and merges fragments when a real one would, in virtual time."""

from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from peer.training.messages import (
    Failed,
    Load,
    RoundClosed,
    TrainerEvent,
    TrainRound,
)
from peer.training.ports import Trainer
from protocol.fragment.fragments import fragments_of_run
from protocol.run.run_spec import RunSpec, SyncSection
from protocol.run.sections import DilocoSection
from protocol.trainer_messages import (
    FragmentMerged,
    FragmentSent,
    Merge,
    Yield,
    Yielded,
)
from simulation.trainer import SimulatedSpeed, simulated_layout, simulated_starter

EventT = TypeVar("EventT", bound=TrainerEvent)
MEMBERS = (("me", 1),)
PARAMETERS = 7 * 128
H = 12


def spec_of(**diloco: object) -> RunSpec:
    section = DilocoSection.model_validate({"overlap_steps": 2, **diloco})
    return RunSpec(sync=SyncSection(method="diloco", inner_steps=H, diloco=section))


@asynccontextmanager
async def training(spec: RunSpec, quota: int = H):
    """A trainer at the beginning of round 0, with steps of a second, and its outer copy."""
    phi = np.zeros(PARAMETERS, np.float32)
    async with simulated_starter(spec, "me", SimulatedSpeed(step_s=1.0))(phi, None) as trainer:
        await trainer.receive()
        await trainer.send(Load())
        await trainer.send(TrainRound(0, quota, MEMBERS, 0, 0, 0.0, 1.0))
        yield trainer, phi


async def until_closed(
    trainer: Trainer, answer: Callable[[FragmentSent], tuple[float, Merge]]
) -> list[tuple[float, TrainerEvent]]:
    """What came until the round was closed, and when; each send is answered after a while."""
    began_s = trio.current_time()
    seen: list[tuple[float, TrainerEvent]] = []
    async with trio.open_nursery() as nursery:

        async def answer_later(after_s: float, merge: Merge) -> None:
            await trio.sleep(after_s)
            await trainer.send(merge)

        while not (seen and isinstance(seen[-1][1], RoundClosed)):
            event = await trainer.receive()
            seen.append((trio.current_time() - began_s, event))
            if isinstance(event, FragmentSent):
                nursery.start_soon(answer_later, *answer(event))
    return seen


async def next_of(trainer: Trainer, kind: type[EventT]) -> EventT:
    """The next event of this kind."""
    while not isinstance(event := await trainer.receive(), kind):
        pass
    return event


def merge_after(after_s: float) -> Callable[[FragmentSent], tuple[float, Merge]]:
    return lambda sent: (after_s, Merge(sent.fragment, sent.cycle, (0,), ()))


def times_of(
    seen: list[tuple[float, TrainerEvent]], kind: type[FragmentSent | FragmentMerged]
) -> list[tuple[int, float]]:
    return [(event.fragment, when_s) for when_s, event in seen if isinstance(event, kind)]


def test_a_toy_model_has_the_fragments_of_a_transformer() -> None:
    layout = simulated_layout(PARAMETERS)
    assert layout.parameters == layout.padded_parameters == PARAMETERS
    fragments = fragments_of_run(DilocoSection(), layout)
    assert [fragment.size for fragment in fragments] == [128, 3 * 128, 3 * 128]
    assert len(fragments_of_run(DilocoSection(), simulated_layout(256))) == 2
    assert len(simulated_layout(128).entries) == 1


async def test_sends_and_merges_come_at_their_steps(autojump_clock: MockClock) -> None:
    async with training(spec_of()) as (trainer, _):
        seen = await until_closed(trainer, merge_after(0.5))
    assert times_of(seen, FragmentSent) == [(1, 4.0), (2, 8.0), (0, 12.0)]
    assert times_of(seen, FragmentMerged) == [(1, 6.0), (2, 10.0)]
    assert seen[-1][0] == 12.0
    closed = seen[-1][1]
    assert isinstance(closed, RoundClosed)
    assert closed.steps == H


async def test_waiting_for_a_late_merge_costs_the_time_it_is_late(
    autojump_clock: MockClock,
) -> None:
    async with training(spec_of(late="wait")) as (trainer, _):
        seen = await until_closed(trainer, merge_after(4.5))
    merged = [event for _, event in seen if isinstance(event, FragmentMerged)]
    assert [event.waited_s for event in merged] == [2.5, 2.5]
    assert seen[-1][0] == pytest.approx(H + 5.0)


async def test_skipping_a_late_merge_costs_nothing(autojump_clock: MockClock) -> None:
    async with training(spec_of(late="skip")) as (trainer, _):
        seen = await until_closed(trainer, merge_after(2.5))
    # A command that comes in the middle of a step is obeyed at its end.
    assert times_of(seen, FragmentMerged) == [(1, 7.0), (2, 11.0)]
    assert seen[-1][0] == 12.0


async def test_the_outer_copy_comes_into_the_weights(autojump_clock: MockClock) -> None:
    async with training(spec_of(merge=0.0, overlap_steps=0)) as (trainer, phi):
        while not isinstance(sent := await trainer.receive(), FragmentSent):
            pass
        phi[:] = 7.0
        await trainer.send(Merge(sent.fragment, sent.cycle, (0,), ()))
        assert isinstance(await trainer.receive(), FragmentMerged)
        (start, stop), *_ = fragments_of_run(DilocoSection(), simulated_layout(PARAMETERS))[1].spans
        assert np.all(trainer.model.theta[start:stop] == 7.0)
        assert np.all(trainer.model.theta[:128] != 7.0)


async def test_yield_and_amend(autojump_clock: MockClock) -> None:
    async with training(spec_of()) as (trainer, _):
        await trainer.send(Yield(2))
        assert await next_of(trainer, Yielded) == Yielded(2)
        with trio.move_on_after(20):
            seen = await until_closed(trainer, merge_after(0.5))
            pytest.fail(f"it did not wait for Merge: {seen}")


async def test_the_amendment_ends_the_wait(autojump_clock: MockClock) -> None:
    async with training(spec_of()) as (trainer, _), trio.open_nursery() as nursery:
        await trainer.send(Yield(2))
        await next_of(trainer, Yielded)  # after the first step

        async def amend_later() -> None:
            await trio.sleep(10.0)
            await trainer.send(Merge(2, None, (), (), (0,)))

        nursery.start_soon(amend_later)
        seen = await until_closed(trainer, merge_after(0.5))
    assert times_of(seen, FragmentSent) == [(1, 3.0), (2, 10.0), (0, 14.0)]
    assert [e.waited_s for _, e in seen if isinstance(e, FragmentSent)] == [0.0, 3.0, 0.0]


@pytest.mark.parametrize("quota", [1, 5, 30])
async def test_any_speed_sends_each_fragment_once(autojump_clock: MockClock, quota: int) -> None:
    async with training(spec_of(), quota) as (trainer, _):
        seen = await until_closed(trainer, merge_after(0.25))
    sent = [(event.fragment, event.cycle) for _, event in seen if isinstance(event, FragmentSent)]
    assert sent == [(1, 0), (2, 0), (0, 1)]


async def test_a_round_of_no_steps_sends_the_rest(autojump_clock: MockClock) -> None:
    async with training(spec_of(), quota=0) as (trainer, _):
        seen = await until_closed(trainer, merge_after(0.25))
        assert times_of(seen, FragmentSent) == [(1, 0.0), (2, 0.0)]
        merged = [await trainer.receive() for _ in range(2)]
        assert all(isinstance(event, FragmentMerged) for event in merged)


async def test_what_makes_no_sense_ends_the_life(autojump_clock: MockClock) -> None:
    async with training(spec_of()) as (trainer, _):
        await trainer.send(Merge(0, 0, (), ()))
        failed = await next_of(trainer, Failed)
        assert failed.reason == "error"
