"""A trainer in virtual time: the same conversation, a toy model, no process.

The model is that of toy.py. What is sent and what comes back are the real ones, for averaging in
pairs and for fragments alike (sync.py).

Time is trio's clock, and it is read, not waited for: a step is done when its time has come, whether
or not somebody looks; so the simulation needs no task of its own, and costs one wake-up per event
rather than per step.

Failures are planned by the machine's own count of steps, which goes on over the lives of its
trainers.
"""

import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import blake3
import numpy as np
import torch
import trio

from peer.codec import get_codec
from protocol.data_plan import DataPlan
from protocol.fragments import fragments_of_run
from protocol.run_spec import RunSpec

from .errors import WrongCommand
from .fragments import FragmentSnapshots
from .messages import (
    PROGRESS_INTERVAL_S,
    CloseRound,
    Evaluate,
    Evaluated,
    Failed,
    Load,
    Progress,
    Ready,
    RoundClosed,
    Stop,
    TrainerCommand,
    TrainerEvent,
    TrainRound,
    is_progress_due,
)
from .pairs import PairSync
from .ports import Float32Vector, StartTrainer, Trainer, TrainerDied
from .schedule import learning_rate, nominal_step
from .shared import CodeRegions, regions_of_run
from .snapshot import Snapshots
from .streaming import FragmentSync
from .sync import Sync
from .toy import SimulatedSpeed, ToyProblem, ToyWeights, loss_of, optimum, simulated_layout

__all__ = [
    "SimulatedSpeed",
    "SimulatedTrainer",
    "ToyProblem",
    "simulated_layout",
    "simulated_starter",
]


@dataclass(slots=True)
class _Machine:
    """What outlives a trainer."""

    noise: np.random.Generator
    steps: int = 0


@dataclass(slots=True)
class _Round:
    order: TrainRound
    started_s: float
    next_step_s: float
    reported_s: float
    steps: int = 0
    loss_sum: float = 0.0
    close_at_steps: int | None = None

    @property
    def due_steps(self) -> int:
        quota = self.order.quota
        return quota if self.close_at_steps is None else min(quota, self.close_at_steps)


@dataclass(slots=True)
class _Life:
    """State of one life."""

    round: _Round | None = None
    next_order: TrainRound | None = None
    death: str | None = None
    events: deque[TrainerEvent] = field(default_factory=deque)


class SimulatedTrainer:
    """One life of a simulated trainer. See `peer.training.ports.Trainer`."""

    def __init__(
        self,
        spec: RunSpec,
        peer_id: str,
        slow: Float32Vector,
        speed: SimulatedSpeed,
        problem: ToyProblem,
        machine: _Machine,
        micro_batch_cap: int | None = None,
        overlap_steps: int | None = None,
    ) -> None:
        self._spec = spec
        self._overlap_steps = overlap_steps
        self._peer_id = peer_id
        self._slow = slow
        self._speed = speed
        self._problem = problem
        self._machine = machine
        batch_size = spec.training.batch_size
        self._micro_batch = min(batch_size, micro_batch_cap or batch_size)
        self._plan = DataPlan(spec.seed, problem.num_blocks)
        self._optimum = optimum(spec.seed, slow.size)
        self._weights = ToyWeights(slow)
        self._regions = CodeRegions(-1, regions_of_run(spec, self._weights.layout), writable=True)
        self._life = _Life()
        self._now_s = trio.current_time()
        self._sync = self._chosen_sync()
        self._changed = trio.Event()
        self._ready_s = trio.current_time() + speed.start_s

    def __repr__(self) -> str:
        return f"<SimulatedTrainer {self._peer_id} at step {self._machine.steps}>"

    def _chosen_sync(self) -> Sync:
        codec, diloco = get_codec(self._spec.sync.codec), self._spec.sync.diloco
        emit, slow_P = self._life.events.append, torch.from_numpy(self._slow)
        if diloco is None:
            pairs = Snapshots(self._weights, slow_P, self._regions, codec)
            return PairSync(pairs, emit, overlap=self._spec.sync.overlap)
        fragments = fragments_of_run(diloco, self._weights.layout)
        streamed = FragmentSnapshots(self._weights, slow_P, self._regions, codec, fragments, diloco)
        clock_s, tau = lambda: self._now_s, self._overlap_steps
        return FragmentSync(self._spec, streamed, emit, clock_s, tau)

    async def send(self, command: TrainerCommand) -> None:
        """Raises TrainerDied."""
        await trio.lowlevel.checkpoint()
        self._advance(trio.current_time())
        self._raise_if_dead()
        held = self._sync.holds_training
        self._obey(command)
        self._do_what_is_due()
        if held and not self._sync.holds_training and self._life.round is not None:
            # Nothing was trained while it was held.
            self._life.round.next_step_s = self._now_s + self._speed.step_s
        self._advance(trio.current_time())
        self._changed.set()
        self._changed = trio.Event()

    async def receive(self) -> TrainerEvent:
        """The next event, in order. Raises TrainerDied."""
        if self._ready_s < math.inf:
            await trio.sleep_until(self._ready_s)
            self._ready_s = math.inf
            return self._ready()
        await trio.lowlevel.checkpoint()
        while True:
            self._advance(trio.current_time())
            if self._life.events:
                return self._life.events.popleft()
            self._raise_if_dead()
            with trio.move_on_at(self._next_event_s()):
                await self._changed.wait()

    def codes(self, slot: int) -> memoryview:
        """Codes of the snapshot in `slot`."""
        return self._regions.codes(slot).toreadonly()

    def fragment_codes(self, fragment: int) -> memoryview:
        """Codes of the fragment's last send."""
        return self._regions.codes(fragment).toreadonly()

    def _raise_if_dead(self) -> None:
        if self._life.death is not None:
            raise TrainerDied(self._life.death)

    def _ready(self) -> Ready:
        layout = self._weights.layout
        return Ready(
            parameters=self._slow.size,
            padded_parameters=self._slow.size,
            layout_digest=layout.digest,
            device="simulated",
            precision="fp32",
            micro_batch=self._micro_batch,
            steps_per_s=1 / self._speed.step_s,
            shapes=tuple((entry.name, entry.shape) for entry in layout.entries),
        )

    # --- commands -------------------------------------------------------------------------------

    def _obey(self, command: TrainerCommand) -> None:
        life = self._life
        match command:
            case Load():
                self._sync.load()
                life.round = life.next_order = None
            case TrainRound():
                life.next_order = command
                self._begin_round()
            case CloseRound(round_):
                if life.round is not None and life.round.order.round == round_:
                    life.round.close_at_steps = life.round.steps + 1  # the step in progress
            case Evaluate(round_):
                loss = loss_of(self._slow, self._optimum)
                blocks = self._spec.data.validation_blocks
                tokens = blocks * self._spec.model.context_length
                life.events.append(Evaluated(round_, loss, tokens, self._speed.validation_s))
                if life.round is not None:
                    life.round.next_step_s += self._speed.validation_s
            case Stop():
                life.death = "the trainer exited with 0"
            case _:
                try:
                    self._sync.obey(command)
                except WrongCommand as error:
                    self._fail("error", str(error))

    def _begin_round(self) -> None:
        life = self._life
        if life.round is None and life.next_order is not None:
            now_s = trio.current_time()
            life.round = _Round(life.next_order, now_s, now_s + self._speed.step_s, now_s)
            life.next_order = None
            self._sync.begin(life.round.order)

    # --- training -------------------------------------------------------------------------------

    def _advance(self, now_s: float) -> None:
        """Do the steps whose time has come, and what follows from them."""
        while (
            (current := self._life.round) is not None
            and self._life.death is None
            and self._trains(current)
            and current.next_step_s <= now_s
        ):
            self._now_s = current.next_step_s
            self._step(current)
            current.next_step_s += self._speed.step_s
            self._report_progress(current)
            self._do_what_is_due()
        self._now_s = now_s

    def _trains(self, current: _Round) -> bool:
        return current.order.quota > 0 and not self._sync.holds_training

    def _do_what_is_due(self) -> None:
        """Send and merge; close the round, and the next one if it has no steps."""
        while self._life.death is None:
            self._sync.advance()
            current = self._life.round
            if current is None or current.steps < current.due_steps or self._sync.holds_close:
                return
            self._close(current)

    def _step(self, current: _Round) -> None:
        self._machine.steps += 1
        if self._planned_failure():
            return
        rate = self._problem.rate * self._rate(current) / self._spec.optimizer.learning_rate
        theta = self._weights.theta
        noise = self._machine.noise.standard_normal(theta.size, dtype=np.float32)
        current.loss_sum += loss_of(theta, self._optimum)
        gradient = theta - self._optimum + np.float32(self._problem.sigma) * noise
        theta -= np.float32(rate) * gradient
        current.steps += 1
        self._sync.stepped(current.order, current.steps, self._spec.tokens_per_step)

    def _planned_failure(self) -> bool:
        steps, speed = self._machine.steps, self._speed
        if steps in speed.die_at_steps:
            self._life.death = "the trainer was killed by signal 9"
        elif steps in speed.non_finite_at_steps:
            self._fail("non_finite", "loss is nan")
        elif steps in speed.out_of_memory_at_steps:
            self._fail("out_of_memory", "out of memory")
        return self._life.death is not None

    def _fail(self, reason: str, detail: str) -> None:
        self._life.events.append(Failed(reason, detail))
        self._life.death = "the trainer exited with 1"

    def _rate(self, current: _Round) -> float:
        inner_steps = self._spec.sync.inner_steps
        order = current.order
        step = nominal_step(order.round, inner_steps, current.steps, order.quota)
        return learning_rate(self._spec.optimizer, step, self._spec.total_rounds * inner_steps)

    def _report_progress(self, current: _Round) -> None:
        since_s = self._now_s - current.reported_s
        if not is_progress_due(current.steps, current.order.quota, since_s):
            return
        current.reported_s = self._now_s
        self._life.events.append(
            Progress(
                round=current.order.round,
                steps=current.steps,
                tokens=current.steps * self._spec.tokens_per_step,
                loss=current.loss_sum / current.steps,
                learning_rate=self._rate(current),
                gradient_norm=0.0,
                step_s=self._speed.step_s,
            )
        )

    def _close(self, current: _Round) -> None:
        life = self._life
        snapshot = self._sync.close(current.order)
        epoch, position = self._data_after(current)
        life.round = None
        life.events.append(
            RoundClosed(
                round=current.order.round,
                slot=snapshot.slot if snapshot else None,
                steps=current.steps,
                tokens=current.steps * self._spec.tokens_per_step,
                loss=current.loss_sum / max(1, current.steps),
                digest=snapshot.digest if snapshot else None,
                epoch=epoch,
                position=position,
                seconds=trio.current_time() - current.started_s,
            )
        )
        self._begin_round()

    def _data_after(self, current: _Round) -> tuple[int, int]:
        """Epoch and position after a round's steps."""
        order = current.order
        if not current.steps:
            return order.epoch, order.position
        count = current.steps * self._spec.training.batch_size
        taken = self._plan.take(order.epoch, order.position, count, self._peer_id, order.members)
        return taken.epoch, taken.position

    def _next_event_s(self) -> float:
        """When something will happen by itself."""
        current = self._life.round
        if current is None or not self._trains(current):
            return math.inf
        wanted = [
            self._steps_to_failure(),
            self._steps_to_progress(current),
            self._sync.steps_to_event(current.order, current.steps),
        ]
        if not self._sync.holds_close:
            wanted.append(current.due_steps - current.steps)
        return current.next_step_s + (min(wanted) - 1) * self._speed.step_s

    def _steps_to_progress(self, current: _Round) -> float:
        to_half = math.ceil(current.order.quota / 2) - current.steps
        wait_s = current.reported_s + PROGRESS_INTERVAL_S - current.next_step_s
        usual = max(1, 1 + math.ceil(wait_s / self._speed.step_s))
        return min(usual, to_half) if to_half > 0 else usual

    def _steps_to_failure(self) -> float:
        speed = self._speed
        planned = speed.die_at_steps | speed.non_finite_at_steps | speed.out_of_memory_at_steps
        return min(
            (at - self._machine.steps for at in planned if at > self._machine.steps),
            default=math.inf,
        )


def simulated_starter(
    spec: RunSpec,
    peer_id: str,
    speed: SimulatedSpeed | None = None,
    problem: ToyProblem | None = None,
    overlap_steps: int | None = None,
) -> StartTrainer:
    """A StartTrainer in virtual time, for the machine of this peer."""
    noise_seed = int.from_bytes(blake3.blake3(peer_id.encode()).digest(length=8), "big")
    machine = _Machine(np.random.default_rng([spec.seed, noise_seed]))

    @contextlib.asynccontextmanager
    async def start(slow: Float32Vector, micro_batch_cap: int | None) -> AsyncIterator[Trainer]:
        yield SimulatedTrainer(
            spec,
            peer_id,
            slow,
            speed or SimulatedSpeed(),
            problem or ToyProblem(),
            machine,
            micro_batch_cap,
            overlap_steps,
        )

    return start
