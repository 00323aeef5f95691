"""Lives of trainers, real and simulated, seen through the Trainer port alone."""

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import blake3
import numpy as np
import torch
import trio

from peer.training.child_process import SpareChild
from peer.training.corpus.folder import open_corpus
from peer.training.messages import (
    Failed,
    Load,
    Ready,
    RoundClosed,
    TrainerEvent,
    TrainerProgress,
    TrainerSettings,
    TrainRound,
)
from peer.training.model import FlatModel, initial_module
from peer.training.ports import Trainer
from peer.training.process import ProcessTrainer, trainer_starter
from peer.training.shared import SharedVector
from protocol.run.run_spec import (
    DataSection,
    ModelSection,
    RunSpec,
    SyncSection,
    TrainingSection,
)
from protocol.run.sections import OptimizerSection
from protocol.schedule.data_plan import DataPlan
from protocol.trainer_messages import FragmentSent, Merge
from simulation.trainer import SimulatedSpeed, ToyProblem, simulated_starter

Event = TypeVar("Event", bound=TrainerEvent)

H = 10
MEMBERS = (("me", 1), ("you", 2))
LIMIT_S = 300.0
VOCABULARY = 256
SIMULATED_PARAMETERS = 256
"""Two fragments, like the real model's."""


def spec_of(**sync: Any) -> RunSpec:
    return RunSpec(
        model=ModelSection(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2),
        data=DataSection(validation_blocks=4),
        optimizer=OptimizerSection(warmup_steps=8, learning_rate=1e-3),
        training=TrainingSection(batch_size=2, total_steps=20 * H),
        sync=SyncSection(inner_steps=H, **sync),
    )


@dataclass
class Life:
    """A trainer from its first word to its end.

    Attributes:
        kill: ends it as a signal would, sooner or later.
        place: epoch and position where its data stands.
        seen: its events since the last `Load`.
    """

    spec: RunSpec
    trainer: Trainer
    num_blocks: int
    piece_blocks: int | None
    kill: Callable[[], None] = lambda: None
    place: tuple[int, int] = (0, 0)
    seen: list[TrainerEvent] = field(default_factory=list)

    async def load(self) -> None:
        await self.trainer.send(Load())
        self.seen, self.place = [], (0, 0)

    async def order(self, round_: int, quota: int = H, start_step: float | None = None) -> None:
        """A round whose quota is all that is owed, so that H nominal steps are done in it."""
        start_step = float(H * round_) if start_step is None else start_step
        stride = H / max(1, quota)
        await self.order_at(round_, quota, start_step, stride)

    async def order_at(self, round_: int, quota: int, start_step: float, stride: float) -> None:
        order = TrainRound(round_, quota, MEMBERS, *self.place, start_step, stride)
        await self.trainer.send(order)

    async def receive(self) -> TrainerEvent:
        event = await self.trainer.receive()
        if isinstance(event, RoundClosed):
            self.place = event.epoch, event.position
        self.seen.append(event)
        return event

    async def until(self, kind: type[Event]) -> Event:
        """The next event of a kind; fragments that are sent meanwhile are merged at once.

        A whole model in pairs is not: it comes back when the test says so.
        """
        while not isinstance(event := await self.receive(), kind):
            assert not isinstance(event, Failed), event
            await self.answer(event)
        return event

    async def answer(self, event: TrainerEvent) -> None:
        if isinstance(event, FragmentSent) and not self.sends_whole:
            await self.merge()

    @property
    def sends_whole(self) -> bool:
        return self.spec.sync.noloco is not None and self.spec.sync.noloco.is_whole

    async def merge(self) -> None:
        """What was sent last comes back."""
        sent = self.of(FragmentSent)[-1]
        await self.trainer.send(Merge(sent.fragment, sent.cycle, (0,), ()))

    async def train(
        self, round_: int, quota: int = H, start_step: float | None = None
    ) -> RoundClosed:
        """One round, to its close."""
        await self.order(round_, quota, start_step)
        return await self.until(RoundClosed)

    async def train_on(self, *rounds: int, quota: int) -> RoundClosed:
        """Rounds, each averaged with nobody. The last one's end."""
        for round_ in rounds:
            closed = await self.train(round_, quota)
            if self.sends_whole:
                await self.merge()
        return closed

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.seen if isinstance(event, kind)]

    def place_after(self, steps: int, place: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        plan = DataPlan(self.spec.seed, self.num_blocks, self.piece_blocks)
        count = steps * self.spec.training.batch_size
        taken = plan.take(*place, count, "me", MEMBERS)
        return (taken.epoch, taken.position) if steps else place


def assert_steps(
    events: list[TrainerProgress | RoundClosed], start_step: float, stride: float
) -> None:
    """That their nominal steps are those of their own steps."""
    expected = [start_step + stride * event.steps for event in events]
    assert [event.step for event in events] == expected


def digest_of(codes: memoryview) -> str:
    return blake3.blake3(codes).hexdigest(length=16)


@asynccontextmanager
async def simulated_life(spec: RunSpec, die_at_step: int | None = None) -> AsyncIterator[Life]:
    deaths = frozenset(() if die_at_step is None else (die_at_step,))
    problem, speed = ToyProblem(), SimulatedSpeed(die_at_steps=deaths)
    slow = np.zeros(SIMULATED_PARAMETERS, np.float32)
    with trio.fail_after(LIMIT_S):
        async with simulated_starter(spec, "me", speed, problem)(slow, None) as trainer:
            assert isinstance(await trainer.receive(), Ready)
            yield Life(spec, trainer, problem.num_blocks, problem.piece_blocks)


@asynccontextmanager
async def real_life(spec: RunSpec, corpus_path: str) -> AsyncIterator[Life]:
    model = FlatModel(initial_module(spec, VOCABULARY), torch.device("cpu"))
    settings = TrainerSettings(
        spec.to_bytes(), "me", corpus_path, VOCABULARY, device="cpu", threads=1
    )
    corpus = open_corpus(Path(corpus_path), spec.model.context_length, spec.data.validation_blocks)
    with SharedVector(model.theta_P.numel()) as slow, trio.fail_after(LIMIT_S):
        slow.array[:] = model.theta_P.numpy()
        async with trainer_starter(settings, slow, SpareChild(settings.threads))(
            slow.array, None
        ) as trainer:
            assert isinstance(await trainer.receive(), Ready)
            assert isinstance(trainer, ProcessTrainer)
            kill = partial(os.kill, trainer.process_id, signal.SIGKILL)
            yield Life(spec, trainer, corpus.num_blocks, corpus.piece_blocks, kill)
