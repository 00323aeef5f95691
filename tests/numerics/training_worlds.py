"""A tiny trainer inside the test: real model, real loop, a script in the daemon's place."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from peer.codec import get_codec
from peer.training.corpus.blocks import Corpus
from peer.training.device import Precision
from peer.training.fragments import FragmentDeltas, FragmentSnapshots, regions_of, values_of
from peer.training.loop import InnerLoop
from peer.training.messages import Load, RoundClosed, Said, Stop, TrainerCommand, TrainRound
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import inner_optimizer
from peer.training.shared import CodeRegions
from peer.training.step import Stepper
from protocol.run.run_spec import (
    DataSection,
    ModelSection,
    RunSpec,
    SyncSection,
    TrainingSection,
)
from protocol.run.sections import OptimizerSection
from protocol.trainer_messages import ONE_CHUNK, Merge

CPU = torch.device("cpu")
VOCABULARY = 32
INNER_STEPS = 4
MEMBERS = (("me", 1),)


def tiny_spec(**sync) -> RunSpec:
    return RunSpec(
        seed=7,
        model=ModelSection(
            hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, context_length=8
        ),
        data=DataSection(validation_blocks=4),
        optimizer=OptimizerSection(warmup_steps=2),
        training=TrainingSection(batch_size=4, total_steps=40),
        sync=SyncSection(**{"inner_steps": INNER_STEPS, **sync}),
    )


def tiny_corpus(spec: RunSpec) -> Corpus:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 2000).astype(np.uint8)
    tokens[1::2] = tokens[0::2]  # something to learn: each token comes twice
    return Corpus(tokens[:1500], tokens[1500:], spec.model.context_length)


@dataclass
class World:
    spec: RunSpec
    corpus: Corpus
    model: FlatModel
    stepper: Stepper
    values: FragmentDeltas | FragmentSnapshots
    slow: npt.NDArray[Any]
    regions: CodeRegions

    @property
    def theta(self) -> npt.NDArray[Any]:
        return self.model.theta_P.cpu().numpy()

    def decoded(self) -> npt.NDArray[Any]:
        """The whole model, as it was sent last."""
        out = np.empty_like(self.slow)
        codes = torch.frombuffer(self.regions.codes(0), dtype=torch.uint8)
        get_codec(self.spec.sync.codec).decode(codes, torch.from_numpy(out))
        return out


def build_world(
    spec: RunSpec, micro_batch: int = 4, device: torch.device = CPU, precision: Precision = "fp32"
) -> World:
    torch.set_num_threads(1)
    model = FlatModel(initial_module(spec, VOCABULARY), device)
    slow = model.theta_P.cpu().numpy().copy()
    slow_P = torch.from_numpy(slow)
    regions = CodeRegions(-1, regions_of(spec, model.layout), writable=True)
    optimizer = inner_optimizer(model, spec.optimizer, precision)
    stepper = Stepper(model, optimizer, precision, micro_batch)
    values = values_of(spec, model, slow_P, regions)
    return World(spec, tiny_corpus(spec), model, stepper, values, slow, regions)


PAUSE = None
"""In a script: no command now, so the trainer goes on with a step."""

Answer = Callable[[Said], list[TrainerCommand | None]]


@dataclass
class Script:
    """The daemon: commands in order; what it answers to an event is put behind them."""

    commands: deque[TrainerCommand | None]
    answer: Answer = lambda event: []
    before: Callable[[TrainerCommand], None] = lambda command: None
    events: list[Said] = field(default_factory=list)
    now_s: float = 0.0

    def clock_s(self) -> float:
        """A clock that goes on by a second when the trainer waits and nothing is there."""
        return self.now_s

    def next_command(self, *, wait: bool) -> TrainerCommand | None:
        self.now_s += wait and (not self.commands or self.commands[0] is PAUSE)
        if not self.commands:
            return Stop() if wait else None
        command = self.commands.popleft()
        if command is None:
            return self._after_pauses() if wait else None
        self.before(command)
        return command

    def _after_pauses(self) -> TrainerCommand:
        while self.commands:
            if (command := self.commands.popleft()) is not None:
                self.before(command)
                return command
        return Stop()

    def emit(self, event: Said) -> None:
        self.events.append(event)
        self.commands.extend(self.answer(event))

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def run(world: World, *commands, answer: Answer = lambda event: [], before=lambda command: None):
    """Run the loop through these commands after a Load, until it has nothing to do."""
    script = Script(deque([Load(), *commands]), answer, before)
    spec, corpus, stepper, values = world.spec, world.corpus, world.stepper, world.values
    InnerLoop(spec, "me", corpus, stepper, values, script, script.clock_s).run()
    return script


def order(round_: int, quota: int = 4, position: int = 0) -> TrainRound:
    stride = INNER_STEPS / max(1, quota)
    return TrainRound(round_, quota, MEMBERS, 0, position, float(INNER_STEPS * round_), stride)


def back(cycle: int) -> Merge:
    """The average of a whole model is back."""
    return Merge(0, cycle, ONE_CHUNK, ())


def next_order(closed: RoundClosed) -> TrainRound:
    following, start_step = closed.round + 1, closed.step
    place = closed.epoch, closed.position
    return TrainRound(following, 4, MEMBERS, *place, start_step, INNER_STEPS / 4)
