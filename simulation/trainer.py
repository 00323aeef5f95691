"""A trainer in virtual time: the same conversation, a toy model, no process.

The round machine decides, as in a real trainer (round_machine.py); the model is a point theta that
takes noisy gradient steps towards an optimum c:

    theta <- theta - rate * (theta - c + sigma * noise)
    loss   = floor + mean((theta - c)^2) / 2

c follows from the run's seed, so all peers look for the same; the noise from the peer's, so they
differ, and averaging them helps, as with a real model. Codes and merges are the real ones
(sync.py).

Time is trio's clock. It is read and not waited for: a call first does the steps whose time has
come, so the simulation needs no task of its own. A command that comes in the middle of a step is
obeyed when the step is done, as by a real trainer.

Failures are planned by the machine's count of steps, which goes on over the lives of its trainers.
"""

import contextlib
import functools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import blake3
import numpy as np
import torch
import trio
from trio.lowlevel import ParkingLot

from peer.training import messages
from peer.training.fragments import FragmentDeltas, regions_of, values_of
from peer.training.ports import NonFinite, StartTrainer, Trainer, TrainerDied, WrongCommand
from peer.training.round_machine import Action, RoundMachine, TrainStep, Wait
from peer.training.shared import CodeRegions
from peer.training.sync import TimeSpent, sync_of
from peer.training.tensor_file import keep_weights, take_over_weights
from protocol.content.samples import Float32Vector
from protocol.run.layout import ALIGNMENT, Layout
from protocol.run.run_spec import RunSpec
from protocol.schedule.data_plan import DataPlan
from protocol.trainer_messages import Tried, Try

LOSS_FLOOR: Final = 1.0
SHORTEST_STEP: Final = 0.3
"""Bound of a scattered step, as a share of its mean."""
MAX_LAYERS: Final = 6
"""With fragments of three layers, as they are by default, three fragments."""
NOISE_PLACES: Final = 1 << 16
"""More than the steps of a swarm, so that hardly two have the same noise."""


@dataclass(frozen=True, slots=True)
class SimulatedSpeed:
    """How fast a machine is, and when it fails.

    Attributes:
        step_s: mean duration of an inner step.
        scatter: standard deviation of that duration, as a share.
        stretch_steps: steps in a row that take equally long, so that rounds scatter, too.
        start_s: time from start to `Ready`.
        validation_s: for how long a validation holds up training.
        die_at_steps, non_finite_at_steps, out_of_memory_at_steps: counts of the machine's steps at
            which its trainer is killed, its loss is NaN, or its memory runs out.
    """

    step_s: float = 0.1
    scatter: float = 0.0
    stretch_steps: int = 1
    scatter_seed: int = 0
    start_s: float = 1.0
    validation_s: float = 0.0
    die_at_steps: frozenset[int] = frozenset()
    non_finite_at_steps: frozenset[int] = frozenset()
    out_of_memory_at_steps: frozenset[int] = frozenset()

    def duration_s(self, step: int) -> float:
        """Duration of the machine's step of this number, from 0."""
        if not self.scatter:
            return self.step_s
        drawn = np.random.default_rng([self.scatter_seed, step // self.stretch_steps])
        scattered = 1 + self.scatter * float(drawn.standard_normal())
        return self.step_s * max(SHORTEST_STEP, scattered)


@dataclass(frozen=True, slots=True)
class ToyProblem:
    """The quadratic that all peers of a simulated run minimise.

    Attributes:
        rate: step size at the schedule's full learning rate.
        sigma: standard deviation of the gradient noise per value.
        num_blocks, piece_blocks: of the corpus, and of a piece.
        measures: whether averages are tried (`Try`).
    """

    rate: float = 0.1
    sigma: float = 1.0
    num_blocks: int = 1 << 16
    piece_blocks: int = 1 << 8
    measures: bool = False


def simulated_layout(padded_parameters: int) -> Layout:
    """The layout of a toy model: like a transformer's, an embedding and up to MAX_LAYERS blocks."""
    blocks = padded_parameters // ALIGNMENT
    parts = min(blocks, MAX_LAYERS + 1)
    cuts = [part * blocks // parts * ALIGNMENT for part in range(parts + 1)]
    names = ["embed", *(f"layers.{layer}.weight" for layer in range(parts - 1))]
    sizes = (stop - start for start, stop in pairwise(cuts))
    return Layout.from_shapes({name: (size,) for name, size in zip(names, sizes, strict=True)})


class ToyWeights:
    """theta as a model's flat vector. Implements `peer.training.fragments.FastWeights`."""

    def __init__(self, start: Float32Vector) -> None:
        self.theta = start.copy()
        self.theta_P = torch.from_numpy(self.theta)
        self.gradient_P = torch.zeros_like(self.theta_P)
        self.moved = False
        self.notes = list[str]()
        self.device = torch.device("cpu")
        self.layout = simulated_layout(start.size)


def optimum(seed: int, size: int) -> Float32Vector:
    """c: the point that all peers of a run look for."""
    return np.random.default_rng([seed, 0]).standard_normal(size, dtype=np.float32)


@functools.lru_cache(maxsize=4)
def _noise_table(size: int) -> Float32Vector:
    """Normal values, with NOISE_PLACES places at which `size` of them can begin."""
    return np.random.default_rng([0, 2]).standard_normal(NOISE_PLACES + size, dtype=np.float32)


class ToyNoise:
    """The noise of a peer's steps: standard normal.

    A step takes its values from a table that all share, from a place that the peer's own generator
    draws. To draw each value took a fifth of the time of simulated swarms.
    """

    def __init__(self, seed: int, peer_id: str) -> None:
        digest = blake3.blake3(peer_id.encode()).digest(length=8)
        self._places = np.random.default_rng([seed, int.from_bytes(digest, "big")])

    def of_step(self, size: int) -> Float32Vector:
        place = int(self._places.integers(NOISE_PLACES))
        return _noise_table(size)[place : place + size]


def loss_at(to_optimum: Float32Vector) -> float:
    return LOSS_FLOOR + float(np.mean(np.square(to_optimum))) / 2


@dataclass(slots=True)
class SimulatedMachine:
    """The part of a machine that outlives its trainers.

    Attributes:
        slept_s: for how long the machine has slept so far; a sleeping machine does not train.
        steps: of all its trainers.
    """

    spec: RunSpec
    peer_id: str
    speed: SimulatedSpeed
    problem: ToyProblem
    slept_s: Callable[[], float]
    noise: ToyNoise
    steps: int = 0


class SimulatedTrainer:
    """A simulated trainer of a whole model. Implements `peer.training.ports.Trainer`."""

    boundaries = None

    def __init__(
        self, machine: SimulatedMachine, slow: Float32Vector, micro_batch_cap: int | None
    ) -> None:
        self._machine = machine
        self._slow = slow
        self._spec = spec = machine.spec
        self._speed, self._problem = machine.speed, machine.problem
        self._now_s = trio.current_time()
        self._slept_before_s = machine.slept_s()
        batch_size = spec.training.batch_size
        self._micro_batch = min(batch_size, micro_batch_cap or batch_size)
        self._optimum = optimum(spec.seed, slow.size)
        self.model = ToyWeights(slow)
        self._regions = CodeRegions(-1, regions_of(spec, self.model.layout), writable=True)
        self._events: deque[messages.TrainerEvent] = deque()
        self._values = values_of(spec, self.model, torch.from_numpy(slow), self._regions)
        self._round_machine = RoundMachine(
            spec,
            machine.peer_id,
            DataPlan(spec.seed, self._problem.num_blocks, self._problem.piece_blocks),
            sync_of(spec, self._values, self._events.append, TimeSpent(lambda: self._now_s)),
            self._events,
        )
        self._action: Action = Wait()
        self._waiting: deque[messages.TrainerCommand] = deque()
        self._death: str | None = None
        self._next_step_s = math.inf
        self._changed = ParkingLot()
        self._ready_s = self._now_s + self._speed.start_s

    async def send(self, command: messages.TrainerCommand) -> None:
        await trio.lowlevel.checkpoint()
        self._advance(trio.current_time())
        self._raise_if_dead()
        if isinstance(self._action, TrainStep):
            self._waiting.append(command)
        else:
            self._obey(command)
        self._changed.unpark_all()

    async def receive(self) -> messages.TrainerEvent:
        if self._ready_s < math.inf:
            await trio.sleep_until(self._ready_s)
            self._ready_s = math.inf
            return self._ready()
        await trio.lowlevel.checkpoint()
        while True:
            self._advance(trio.current_time())
            if self._events:
                return self._events.popleft()
            self._raise_if_dead()
            training = isinstance(self._action, TrainStep)
            with trio.move_on_at(self._next_step_s if training else math.inf):
                await self._changed.park()

    def codes(self, region: int) -> memoryview:
        return self._regions.codes(region).toreadonly()

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise TrainerDied(self._death)

    def _ready(self) -> messages.Ready:
        layout = self.model.layout
        return messages.Ready(
            device="simulated",
            precision="fp32",
            micro_batch=self._micro_batch,
            steps_per_s=1 / self._speed.step_s,
            shapes=tuple((entry.name, entry.shape) for entry in layout.entries),
            measures=self._problem.measures,
        )

    # --- what the round machine says ------------------------------------------------------------

    def _obey(self, command: messages.TrainerCommand) -> None:
        try:
            self._round_machine.obey(command, self._now_s)
        except WrongCommand as error:
            self._fail("error", f"WrongCommand: {error}")
            return
        if isinstance(command, messages.Load) and command.kept is not None:
            own_steps = take_over_weights(Path(command.kept), self.model.theta_P, None)
            self._round_machine.own_steps = own_steps
        self._follow()

    def _advance(self, now_s: float) -> None:
        """Do the steps whose time has come, and obey what has waited for them."""
        slept_s = self._machine.slept_s()
        self._next_step_s += slept_s - self._slept_before_s
        self._slept_before_s = slept_s
        while self._death is None and isinstance(step := self._action, TrainStep):
            if self._next_step_s > now_s:
                break
            self._now_s = self._next_step_s
            self._next_step_s += self._speed.duration_s(self._machine.steps + 1)
            self._train(step)
            while self._waiting and self._death is None:
                self._obey(self._waiting.popleft())
        self._now_s = now_s

    def _follow(self) -> None:
        """Do what takes no step, and note what comes then."""
        trained = isinstance(self._action, TrainStep)
        try:
            while isinstance(
                action := self._round_machine.next_action(self._now_s),
                messages.Evaluate | messages.Keep | Try,
            ):
                if isinstance(action, messages.Keep):
                    own_steps = self._round_machine.own_steps
                    keep_weights(Path(action.path), self.model.theta_P, None, own_steps)
                    self._round_machine.kept(None)
                elif isinstance(action, Try):
                    self._try(action)
                else:
                    self._evaluate(action)
        except NonFinite as error:
            self._fail("non_finite", str(error))
            return
        if isinstance(action, TrainStep) and not trained:
            self._next_step_s = self._now_s + self._speed.duration_s(self._machine.steps)
        elif isinstance(action, messages.Stop):
            self._death = "the trainer exited with 0"
        self._action = action

    def _evaluate(self, order: messages.Evaluate) -> None:
        """Tell the loss at once; its time holds up training."""
        took_s, loss = self._speed.validation_s, loss_at(self._slow - self._optimum)
        log_probs = b""
        if order.sequences:
            count = len(order.tokens) // 4 - order.sequences
            log_probs = np.full(count, -loss, "<f4").tobytes()
        self._round_machine.measured(messages.Evaluated(order.round, loss, took_s, log_probs))
        self._next_step_s += took_s

    def _try(self, order: Try) -> None:
        """Tell what a merge would gain, which takes no time here."""
        assert isinstance(self._values, FragmentDeltas)
        before = loss_at(self.model.theta - self._optimum)
        with self._values.merged(order.fragment):
            gain = before - loss_at(self.model.theta - self._optimum)
        self._round_machine.measured(Tried(order.fragment, order.cycle, gain, 0.0))

    def _train(self, step: TrainStep) -> None:
        self._machine.steps += 1
        if self._planned_failure():
            return
        rate = self._problem.rate * step.learning_rate / self._spec.optimizer.learning_rate
        theta = self.model.theta
        to_optimum = theta - self._optimum
        loss = loss_at(to_optimum)
        gradient = self._machine.noise.of_step(theta.size) * np.float32(self._problem.sigma)
        gradient += to_optimum
        gradient *= np.float32(rate)
        theta -= gradient
        took_s = self._speed.duration_s(self._machine.steps - 1)
        self._round_machine.stepped(step, self._now_s, took_s)
        self._round_machine.numbers_known(loss, 0.0, 0.0)
        self._follow()

    def _planned_failure(self) -> bool:
        steps, speed = self._machine.steps, self._speed
        if steps in speed.die_at_steps:
            self._death = "the trainer was killed by signal 9"
        elif steps in speed.non_finite_at_steps:
            self._fail("non_finite", "loss is nan")
        elif steps in speed.out_of_memory_at_steps:
            self._fail("out_of_memory", "out of memory")
        return self._death is not None

    def _fail(self, reason: str, detail: str) -> None:
        self._events.append(messages.Failed(reason, detail))
        self._death = "the trainer exited with 1"


def simulated_starter(
    spec: RunSpec,
    peer_id: str,
    speed: SimulatedSpeed | None = None,
    problem: ToyProblem | None = None,
    slept_s: Callable[[], float] = lambda: 0.0,
) -> StartTrainer:
    """Starts trainers in virtual time, on the machine of this peer."""
    machine = SimulatedMachine(
        spec,
        peer_id,
        speed or SimulatedSpeed(),
        problem or ToyProblem(),
        slept_s,
        ToyNoise(spec.seed, peer_id),
    )

    @contextlib.asynccontextmanager
    async def start(slow: Float32Vector, micro_batch_cap: int | None) -> AsyncIterator[Trainer]:
        yield SimulatedTrainer(machine, slow, micro_batch_cap)

    return start
