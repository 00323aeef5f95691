"""The trainer as a child process: the real Trainer port.

    with SharedVector(padded_parameters) as slow:
        start = trainer_starter(settings, slow, spare)
        async with start(slow.array, None) as trainer:
            ready = await trainer.receive()

A life begins with `Ready` or ends with `TrainerDied`. A trainer dies with the block, with the
daemon (its socket ends), and when it stays silent for too long. Nothing here imports torch's
models: layouts and a founder's initial weights come from a child of the same kind (`create_model`).

A silent trainer counts as hung: until `Ready` after `START_TIMEOUT_S`, for importing, building and
compiling report nothing; then after some steps of its own speed, and a fixed floor for machines
that are suspended or swap. Of a compiled model that floor is `START_TIMEOUT_S` too: an
evaluation, or a new shape, may be compiled at any time. A trainer that waits says so (pipe.py).
"""

import contextlib
import math
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import trio
from msgspec.structs import replace

from peer.codec import get_codec
from peer.runtime.child_process import STOP_GRACE_S
from peer.runtime.files import private
from protocol.content.samples import Float32Vector
from protocol.run.layout import Layout
from protocol.run.needs import sharding_fault
from protocol.run.run_spec import RunSpec

from . import messages
from .child_process import SpareChild, TrainerChild
from .fragments import regions_of
from .ports import StartTrainer, Trainer, TrainerDied
from .shared import BoundaryRing, CodeRegions, SharedVector, boundary_shape, code_memory

START_TIMEOUT_S: Final = 900.0
"""Longest time to import, build, compile and calibrate."""
SILENCE_FLOOR_S: Final = 60.0
SILENCE_STEPS: Final = 50
"""Every step longer than 0.2 s is reported, so this many without a word are a hang."""


class ProcessTrainer:
    """One life of a trainer process. Implements `peer.training.ports.Trainer`.

    Args:
        memory: descriptors of the memory for codes; and for boundaries, where it holds a stage.
    """

    def __init__(self, child: TrainerChild, spec: RunSpec, memory: Sequence[int]) -> None:
        self.boundaries: BoundaryRing | None = None
        self._child = child
        self._spec = spec
        self._memory = memory
        self._regions: CodeRegions | None = None
        evaluation_steps = spec.data.validation_blocks / spec.training.batch_size
        self._silence_steps = SILENCE_STEPS + evaluation_steps
        self._floor_s, self._slowest_step_s = SILENCE_FLOOR_S, 0.0
        self._patience_s = START_TIMEOUT_S

    @property
    def process_id(self) -> int:
        return self._child.process.pid

    async def send(self, command: messages.TrainerCommand) -> None:
        await self._child.send(command)

    async def receive(self) -> messages.TrainerEvent:
        """The next event. A process that is silent for too long is killed. Raises TrainerDied."""
        event: messages.Said = messages.Waiting()
        while isinstance(event, messages.Waiting):
            with trio.move_on_after(self._patience_s) as scope:
                event = await self._child.receive()
            if scope.cancelled_caught:
                self._child.kill()
                raise TrainerDied(f"the trainer hung: no word from it for {self._patience_s:.0f} s")
        match event:
            case messages.ModelCreated():
                raise TrainerDied("the trainer made a model instead of training one")
            case messages.Ready():
                if event.compiled:
                    self._floor_s = START_TIMEOUT_S
                self._be_patient(1 / max(event.steps_per_s, 1e-6))
                self._map_memory(event.layout)
            case messages.TrainerProgress():
                self._be_patient(event.step_s)
        return event

    def _be_patient(self, step_s: float) -> None:
        self._slowest_step_s = max(self._slowest_step_s, step_s)
        self._patience_s = self._floor_s + self._silence_steps * self._slowest_step_s

    def _map_memory(self, layout: Layout) -> None:
        spec, (codes_fd, *ring_fd) = self._spec, self._memory
        self._regions = CodeRegions(codes_fd, regions_of(spec, layout), writable=False)
        if ring_fd:
            codec, num_values = get_codec(spec.pipeline.codec), math.prod(boundary_shape(spec))
            self.boundaries = BoundaryRing(ring_fd[0], codec, num_values)

    def codes(self, region: int) -> memoryview:
        assert self._regions is not None
        return self._regions.codes(region)


def trainer_starter(
    settings: messages.TrainerSettings, slow: SharedVector, spare: SpareChild
) -> StartTrainer:
    """Starts trainers in processes; every start must be given `slow.array`.

    A cap of 0 sequences says that memory was too small for one: from then on less is kept of each;
    and if that was so already each of several ranks gets a part of the weights alone.
    """
    spec, recomputes = settings.run_spec(), settings.checkpoint_activations
    shards = settings.shard_weights

    @contextlib.asynccontextmanager
    async def start(vector: Float32Vector, micro_batch_cap: int | None) -> AsyncIterator[Trainer]:
        if vector.ctypes.data != slow.array.ctypes.data or vector.size != slow.array.size:
            raise ValueError("the trainer can only start on the shared slow weights")
        nonlocal recomputes, shards
        shards |= recomputes and micro_batch_cap == 0 and not sharding_fault(spec)
        recomputes |= micro_batch_cap == 0
        told = replace(
            settings,
            micro_batch_cap=micro_batch_cap or 0,
            checkpoint_activations=recomputes,
            shard_weights=shards,
        )
        made = [code_memory() for _ in range(1 if settings.stage is None else 2)]

        try:
            child = await spare.take()
            try:
                await child.begin("train", told, (slow.read_only_fd, *made))
                yield ProcessTrainer(child, spec, made)
                # It is asked to end, and given a moment.
                with trio.move_on_after(STOP_GRACE_S), contextlib.suppress(TrainerDied):
                    await child.send(messages.Stop())
                    await child.process.wait()
            finally:
                await child.aclose()
        finally:
            for fd in made:
                os.close(fd)

    return start


async def create_model(
    settings: messages.TrainerSettings, weights_path: Path, spare: SpareChild
) -> messages.ModelCreated:
    """Make initial weights, as a run's founder does, or the first holder of a stage.

    They go to the file as one flat vector of fp32 values. The spare child makes them, and can still
    become a trainer afterwards. Raises TrainerDied.
    """
    child = await spare.take()
    answer: messages.Said | None = None
    try:
        weights = open(weights_path, "wb", opener=private)  # noqa: ASYNC230, SIM115 - at once
        with weights as file, trio.move_on_after(START_TIMEOUT_S):
            await child.begin("create", settings, (file.fileno(),))
            answer = await child.receive()
        if isinstance(answer, messages.Failed):
            raise TrainerDied(answer.detail)
        if not isinstance(answer, messages.ModelCreated):
            raise TrainerDied(f"no model within {START_TIMEOUT_S:.0f} s, but {answer}")
    except BaseException:
        await child.aclose()
        raise
    spare.put_back(child)
    return answer
