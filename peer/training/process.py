"""The trainer as a child process: the real Trainer port.

    with SharedVector(padded_parameters) as slow:
        start = trainer_starter(settings, slow)
        async with start(slow.array, None) as trainer:
            ready = await trainer.receive()

A life begins with `Ready` or ends with `TrainerDied`. A trainer dies with the block, with the
daemon (its socket ends), and when it stays silent for longer than its own speed explains.

Nothing here imports torch's models: what a model looks like, and a founder's initial weights, come
from a child of the same kind (`create_model`).

How long a trainer may stay silent before it counts as hung.

Rules:
    1. Until `Ready`, `START_TIMEOUT_S`: importing, building and compiling report nothing.
    2. While it has something to do (a round to train, a validation, a move to apply), it speaks
       within some steps of its own speed: a fixed floor, for machines that are suspended or swap,
       and many times its measured step time.
    3. With nothing to do it may be silent forever. So it may while it may be waiting for us: a
       fragment is in flight or yielded, and we have not sent `Merge` or `Amend` (in pairs that
       holds it up only at the end of the run, or without overlap); or it misses pieces of the
       corpus, and we have not sent `PiecesHere`.
"""

import contextlib
import math
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import trio
from msgspec.structs import replace

from peer.codec import get_codec
from protocol.run.run_spec import RunSpec
from protocol.trainer_messages import Amend, FragmentSent, Merge, Yielded

from .child_process import STOP_GRACE_S, SpareChild, TrainerChild
from .messages import (
    Evaluate,
    Evaluated,
    Failed,
    Load,
    ModelCreated,
    PiecesHere,
    PiecesMissing,
    Ready,
    RoundClosed,
    Stop,
    TrainerCommand,
    TrainerEvent,
    TrainerProgress,
    TrainerSettings,
    TrainRound,
)
from .ports import Float32Vector, StartTrainer, Trainer, TrainerDied
from .ring import BoundaryRing, boundary_bytes
from .schedule import total_steps_of
from .shared import CodeRegions, SharedVector, code_memory
from .sync import trainer_side

# --- watchdog -------------------------------------------------------------------------------------

START_TIMEOUT_S: Final = 900.0
"""Longest time to import, build, compile and calibrate."""
SILENCE_FLOOR_S: Final = 60.0
SILENCE_STEPS: Final = 50
"""Every step longer than 0.2 s is reported, so this many without a word are a hang."""


class Watchdog:
    """Follows the conversation, and says what silence is normal."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._step, self._total_steps = 0.0, math.inf
        self._trains_on = spec.sync.noloco is not None and spec.sync.overlap
        self._evaluation_steps = spec.data.validation_blocks / spec.training.batch_size
        self._ready = False
        self._slowest_step_s = 0.0
        self._open_rounds = 0
        self._owed = 0
        self._awaited: set[int] = set()
        self._misses_pieces = False

    @property
    def silence_bound_s(self) -> float:
        """Longest normal silence from now on; infinite when there is nothing to do."""
        if not self._ready:
            return START_TIMEOUT_S
        at_end = self._step >= self._total_steps
        waits_for_merge = self._awaited and (at_end or not self._trains_on)
        may_wait = self._misses_pieces or waits_for_merge
        training = self._open_rounds > 0 and not may_wait
        if not training and not self._owed:
            return math.inf
        return SILENCE_FLOOR_S + self._slowest_step_s * (SILENCE_STEPS + self._evaluation_steps)

    def sent(self, command: TrainerCommand) -> None:
        """A command is on its way down."""
        match command:
            case Load():
                self._open_rounds = 0
                self._step = 0.0
                self._awaited.clear()
                self._misses_pieces = False
            case PiecesHere():
                self._misses_pieces = False
            case TrainRound():
                self._open_rounds += 1
                self._total_steps = total_steps_of(self._spec, command)
            case Evaluate():
                self._owed += 1
            case Merge(fragment=fragment) | Amend(fragment=fragment):
                self._awaited.discard(fragment)

    def received(self, event: TrainerEvent) -> None:
        """An event came up."""
        match event:
            case Ready():
                self._ready = True
                self._slowest_step_s = 1 / max(event.steps_per_s, 1e-6)
            case TrainerProgress(step=step):
                self._slowest_step_s = max(self._slowest_step_s, event.step_s)
                self._step = step
            case PiecesMissing():
                self._misses_pieces = True
            case RoundClosed():
                self._open_rounds = max(0, self._open_rounds - 1)
            case FragmentSent(fragment=fragment) | Yielded(fragment=fragment):
                self._awaited.add(fragment)
            case Evaluated():
                self._owed = max(0, self._owed - 1)


# --- process --------------------------------------------------------------------------------------


class ProcessTrainer:
    """One life of a trainer process. See `peer.training.ports.Trainer`.

    Args:
        map_memory: the regions of codes, and the ring of boundaries, if there is one, as a trainer
            that is ready says that they are.
    """

    def __init__(
        self,
        child: TrainerChild,
        map_memory: Callable[[Ready], tuple[CodeRegions, BoundaryRing | None]],
        watchdog: Watchdog,
    ) -> None:
        self.boundaries: BoundaryRing | None = None
        self._child = child
        self._map_memory = map_memory
        self._regions: CodeRegions | None = None
        self._watchdog = watchdog
        self._patience = trio.CancelScope()

    @property
    def process_id(self) -> int:
        """The child's process id."""
        return self._child.process.pid

    async def send(self, command: TrainerCommand) -> None:
        """Send a command. Raises TrainerDied."""
        self._watchdog.sent(command)
        # A `receive` under way may have begun when there was nothing to do, so without a bound.
        self._patience.deadline = trio.current_time() + self._watchdog.silence_bound_s
        await self._child.send(command)

    async def receive(self) -> TrainerEvent:
        """The next event.

        Raises:
            TrainerDied: the process ended, or stayed silent for too long (it is then killed).
        """
        bound_s = self._watchdog.silence_bound_s
        self._patience = trio.CancelScope(deadline=trio.current_time() + bound_s)
        with self._patience as scope:
            event = await self._child.receive()
        if scope.cancelled_caught:
            self._child.kill()
            raise TrainerDied(
                f"the trainer hung: no word from it for {self._watchdog.silence_bound_s:.0f} s"
            )
        if isinstance(event, ModelCreated):
            raise TrainerDied("the trainer made a model instead of training one")
        self._watchdog.received(event)
        match event:
            case Ready():
                self._regions, self.boundaries = self._map_memory(event)
            case FragmentSent():
                self._check(event.fragment, event.cycle, event.digest)
        return event

    def _check(self, region: int, cycle: int, digest: str) -> None:
        header = self._regions.header(region) if self._regions else None
        if header is None or (header.cycle, header.digest) != (cycle, digest):
            raise TrainerDied(f"region {region} holds {header}, not what {cycle} sent")

    def codes(self, region: int) -> memoryview:
        """The codes that lie in a region, valid until it is written again."""
        assert self._regions is not None
        return self._regions.codes(region)


def trainer_starter(
    settings: TrainerSettings,
    slow: SharedVector,
    directory: Path | None = None,
    spare: SpareChild | None = None,
) -> StartTrainer:
    """The StartTrainer of real life.

    Args:
        settings: what the child is told; its cap of the micro-batch is set at each start.
        slow: the slow weights; every start must be given `slow.array`.
        directory: where memory without a name is made on systems without memfd.
        spare: its child is taken first, if it has one.
    """
    spec, children = settings.run_spec(), spare or SpareChild(settings.threads)

    @contextlib.asynccontextmanager
    async def start(vector: Float32Vector, micro_batch_cap: int | None) -> AsyncIterator[Trainer]:
        if vector.ctypes.data != slow.array.ctypes.data or vector.size != slow.array.size:
            raise ValueError("the trainer can only start on the shared slow weights")
        told = replace(settings, micro_batch_cap=micro_batch_cap or 0)
        # Codes; and boundaries, where it holds a stage.
        made = [code_memory(0, directory) for _ in range(1 if settings.stage is None else 2)]

        def map_memory(ready: Ready) -> tuple[CodeRegions, BoundaryRing | None]:
            sizes = trainer_side(spec).regions_of(spec, ready.layout)
            regions = CodeRegions(made[0], sizes, writable=False)
            if settings.stage is None:
                return regions, None
            size, codec = boundary_bytes(spec), get_codec(spec.pipeline.codec)
            return regions, BoundaryRing.open(made[1], size, codec)

        try:
            child = await children.take()
            try:
                await child.begin("train", told, (slow.read_only_fd, *made))
                yield ProcessTrainer(child, map_memory, Watchdog(spec))
                # It is asked to end, and given a moment.
                with trio.move_on_after(STOP_GRACE_S), contextlib.suppress(TrainerDied):
                    await child.send(Stop())
                    await child.process.wait()
            finally:
                await child.aclose()
        finally:
            for fd in made:
                os.close(fd)

    return start


async def create_model(
    settings: TrainerSettings, weights_path: Path, spare: SpareChild | None = None
) -> ModelCreated:
    """Make initial weights, as a run's founder does, or the first holder of a stage.

    Args:
        weights_path: where they go, as one flat vector of fp32 values.
        spare: its child makes them, and has it back afterwards: it can still become a trainer.

    Raises:
        TrainerDied: the child failed; the message says how, or holds its last words.
    """
    child = await (spare or SpareChild(settings.threads)).take()
    answer: TrainerEvent | ModelCreated | None = None
    try:
        with weights_path.open("wb") as file, trio.move_on_after(START_TIMEOUT_S):
            await child.begin("create", settings, (file.fileno(),))
            answer = await child.receive()
        if isinstance(answer, Failed):
            raise TrainerDied(answer.detail)
        if not isinstance(answer, ModelCreated):
            raise TrainerDied(f"no model within {START_TIMEOUT_S:.0f} s, but {answer}")
    except BaseException:
        await child.aclose()
        raise
    if spare is None:
        await child.aclose()
    else:
        spare.put_back(child)
    return answer
