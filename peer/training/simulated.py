"""A trainer in virtual time: the same conversation, a toy model, no process.

The model is that of toy.py. Codes, digests, slots, the close of rounds and the line of `Apply` are
the real ones.

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
from protocol.run_spec import RunSpec

from .messages import (
    Applied,
    Apply,
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
)
from .ports import Float32Vector, StartTrainer, Trainer, TrainerDied
from .schedule import learning_rate, nominal_step
from .shared import NUM_SLOTS
from .toy import SimulatedSpeed, ToyProblem, loss_of, optimum, simulated_layout

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
    steps: int = 0
    loss_sum: float = 0.0
    close_at_steps: int | None = None

    @property
    def due_steps(self) -> int:
        quota = self.order.quota
        return quota if self.close_at_steps is None else min(quota, self.close_at_steps)


@dataclass(slots=True)
class _Pending:
    round: int
    theta_s: Float32Vector
    slot: int


@dataclass(slots=True)
class _Life:
    """State of one life."""

    round: _Round | None = None
    next_order: TrainRound | None = None
    pending: _Pending | None = None
    next_slot: int = 0
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
    ) -> None:
        self._spec = spec
        self._peer_id = peer_id
        self._slow = slow
        self._speed = speed
        self._problem = problem
        self._machine = machine
        batch_size = spec.training.batch_size
        self._micro_batch = min(batch_size, micro_batch_cap or batch_size)
        self._plan = DataPlan(spec.seed, problem.num_blocks)
        self._codec = get_codec(spec.sync.codec)
        code_bytes = self._codec.code_bytes(slow.size)
        self._slots = [np.zeros(code_bytes, dtype=np.uint8) for _ in range(NUM_SLOTS)]
        self._optimum = optimum(spec.seed, slow.size)
        self._theta = slow.copy()
        self._life = _Life()
        self._changed = trio.Event()
        self._ready_s = trio.current_time() + speed.start_s

    def __repr__(self) -> str:
        return f"<SimulatedTrainer {self._peer_id} at step {self._machine.steps}>"

    async def send(self, command: TrainerCommand) -> None:
        """Raises TrainerDied."""
        await trio.lowlevel.checkpoint()
        self._advance(trio.current_time())
        self._raise_if_dead()
        self._obey(command)
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
        return memoryview(self._slots[slot].data).toreadonly()

    def _raise_if_dead(self) -> None:
        if self._life.death is not None:
            raise TrainerDied(self._life.death)

    def _ready(self) -> Ready:
        return Ready(
            parameters=self._slow.size,
            padded_parameters=self._slow.size,
            layout_digest=simulated_layout(self._slow.size).digest,
            device="simulated",
            precision="fp32",
            micro_batch=self._micro_batch,
            steps_per_s=1 / self._speed.step_s,
        )

    # --- commands -------------------------------------------------------------------------------

    def _obey(self, command: TrainerCommand) -> None:
        life = self._life
        match command:
            case Load():
                self._theta = self._slow.copy()
                life.round = life.next_order = life.pending = None
            case TrainRound():
                life.next_order = command
                self._begin_round()
            case CloseRound(round_):
                if life.round is not None and life.round.order.round == round_:
                    life.round.close_at_steps = life.round.steps + 1  # the step in progress
            case Apply(round_):
                self._apply(round_)
            case Evaluate(round_):
                loss = loss_of(self._slow, self._optimum)
                blocks = self._spec.data.validation_blocks
                tokens = blocks * self._spec.model.context_length
                life.events.append(Evaluated(round_, loss, tokens, self._speed.validation_s))
                if life.round is not None:
                    life.round.next_step_s += self._speed.validation_s
            case Stop():
                life.death = "the trainer exited with 0"

    def _begin_round(self) -> None:
        life = self._life
        if life.round is None and life.next_order is not None:
            now_s = trio.current_time()
            life.round = _Round(life.next_order, now_s, now_s + self._speed.step_s)
            life.next_order = None

    def _apply(self, round_: int) -> None:
        pending, self._life.pending = self._life.pending, None
        if pending is None or pending.round != round_:
            self._fail("error", f"Apply({round_}), but {pending} is pending")
            return
        decoded = np.empty_like(self._slow)
        self._codec.decode(torch.from_numpy(self._slots[pending.slot]), torch.from_numpy(decoded))
        move = self._slow - decoded
        self._theta += move
        self._life.events.append(Applied(round_, float(np.sqrt(np.mean(np.square(move))))))
        if not self._spec.sync.overlap and self._life.round is not None:
            # Nothing was trained while the snapshot was pending.
            self._life.round.next_step_s = trio.current_time() + self._speed.step_s

    # --- training -------------------------------------------------------------------------------

    @property
    def _held(self) -> bool:
        return not self._spec.sync.overlap and self._life.pending is not None

    def _advance(self, now_s: float) -> None:
        """Do the steps whose time has come, and what follows from them."""
        self._close_if_due()
        while (
            (current := self._life.round) is not None
            and self._life.death is None
            and not self._held
            and current.order.quota > 0
            and current.next_step_s <= now_s
        ):
            self._step(current)
            current.next_step_s += self._speed.step_s
            if current.steps == math.ceil(current.order.quota / 2):
                self._report_progress(current)
            self._close_if_due()

    def _step(self, current: _Round) -> None:
        self._machine.steps += 1
        if self._planned_failure():
            return
        rate = self._problem.rate * self._rate(current) / self._spec.optimizer.learning_rate
        noise = self._machine.noise.standard_normal(self._theta.size, dtype=np.float32)
        current.loss_sum += loss_of(self._theta, self._optimum)
        gradient = self._theta - self._optimum + np.float32(self._problem.sigma) * noise
        self._theta -= np.float32(rate) * gradient
        current.steps += 1

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
        total_steps = self._spec.total_rounds * inner_steps
        return learning_rate(self._spec.optimizer, step, total_steps)

    def _report_progress(self, current: _Round) -> None:
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

    def _close_if_due(self) -> None:
        life = self._life
        current = life.round
        if current is None or current.steps < current.due_steps or life.pending or life.death:
            return
        slot, life.next_slot = life.next_slot, (life.next_slot + 1) % NUM_SLOTS
        life.pending = _Pending(current.order.round, self._theta.copy(), slot)
        self._codec.encode(
            torch.from_numpy(life.pending.theta_s), torch.from_numpy(self._slots[slot])
        )
        epoch, position = self._data_after(current)
        life.round = None
        life.events.append(
            RoundClosed(
                round=current.order.round,
                slot=slot,
                steps=current.steps,
                tokens=current.steps * self._spec.tokens_per_step,
                loss=current.loss_sum / max(1, current.steps),
                digest=blake3.blake3(self._slots[slot].data).hexdigest(length=16),
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
        if current is None or current.order.quota == 0 or self._held:
            return math.inf
        wanted = [self._steps_to_failure()]
        if current.steps < (half := math.ceil(current.order.quota / 2)):
            wanted.append(half - current.steps)
        if self._life.pending is None:
            wanted.append(current.due_steps - current.steps)
        return current.next_step_s + (min(wanted) - 1) * self._speed.step_s

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
        )

    return start
