"""The inner loop, as the trainer process runs it.

Theory. The loop alternates between the daemon's commands and inner steps. Commands are taken
between two steps, without waiting while there is something to train. A round goes through:

    TrainRound(r)     steps, until `quota` are done or `CloseRound` came
    close             RoundClosed(r)

What leaves the trainer meanwhile, and what comes back, is the business of its way of averaging
(sync.py): it is told of each step, does what is due, and may hold up training or the close.

Rules:
    1. A round is closed when it is due (quota done, or asked to close and at least one step done)
       and the way of averaging does not hold it up. A due round that is held up trains on; the
       learning rate then stays that of the round's end.
    2. Nothing is trained while the way of averaging holds it up. Commands are obeyed.
    3. A number that is not finite ends the trainer (`NonFinite`) before it can get into what is
       sent.
    4. A command that makes no sense here is a bug of the daemon: `WrongCommand`, and the trainer
       ends.
    5. A round with quota 0 trains nothing: it is closed as soon as nothing holds it up.
    6. The daemon writes the slow weights only when no Load or Evaluate is on its way, nor anything
       by which the way of averaging reads them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from protocol.data_plan import DataPlan
from protocol.run_spec import RunSpec

from .corpus import Corpus
from .errors import NonFinite, WrongCommand
from .fragments import FragmentSnapshots
from .messages import (
    CloseRound,
    Evaluate,
    Evaluated,
    Load,
    Progress,
    RoundClosed,
    Stop,
    SyncCommand,
    TrainerCommand,
    TrainerEvent,
    TrainRound,
    is_progress_due,
)
from .model import FlatModel
from .optimizer import FlatAdamW
from .pairs import PairSync
from .schedule import learning_rate, nominal_step
from .snapshot import Snapshots
from .step import Stepper, StepResult
from .streaming import FragmentSync
from .sync import Sync


class Channel(Protocol):
    """Commands in, events out."""

    def next_command(self, *, wait: bool) -> TrainerCommand | None:
        """The next command; None when there is none and `wait` is false."""

    def emit(self, event: TrainerEvent) -> None: ...


@dataclass(slots=True)
class RoundInProgress:
    """The round that is being trained."""

    order: TrainRound
    started_s: float
    epoch: int
    position: int
    steps: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    close_asked: bool = False

    @property
    def is_due(self) -> bool:
        """Whether it can be closed."""
        return self.steps >= self.order.quota or (self.close_asked and self.steps > 0)


@dataclass(slots=True)
class SinceProgress:
    """Steps since the last `Progress`."""

    since_s: float
    steps: int = 0
    loss_sum: float = 0.0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """What the loop works with.

    Attributes:
        overlap_steps: tau of this peer, with fragments; None is the run's.
    """

    spec: RunSpec
    peer_id: str
    corpus: Corpus
    model: FlatModel
    optimizer: FlatAdamW
    stepper: Stepper
    snapshots: Snapshots | FragmentSnapshots
    slow_P: torch.Tensor
    overlap_steps: int | None = None


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose numbers have not been looked at."""

    result: StepResult
    learning_rate: float


@dataclass(slots=True)
class _State:
    """Since the last `Load`."""

    steps: int = 0
    round: RoundInProgress | None = None
    next_order: TrainRound | None = None
    last_closed: int = -1
    loaded: bool = False
    launched: _Launched | None = None
    gradient_norm: float = 0.0
    progress: SinceProgress = field(default_factory=lambda: SinceProgress(0.0))


class InnerLoop:
    """Runs the trainer's side of the conversation in messages.py."""

    def __init__(
        self,
        parts: TrainerParts,
        channel: Channel,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._parts = parts
        self._channel = channel
        self._clock_s = clock_s
        self._plan = DataPlan(parts.spec.seed, parts.corpus.num_blocks)
        self._validation_BT = parts.corpus.validation_blocks(parts.spec.data.validation_blocks)
        self._sync = self._chosen_sync()
        self._state = _State()

    def __repr__(self) -> str:
        return f"<InnerLoop in {self._state.round}, {self._sync!r}>"

    def _chosen_sync(self) -> Sync:
        parts, emit = self._parts, self._channel.emit
        spec, snapshots = parts.spec, parts.snapshots
        if isinstance(snapshots, FragmentSnapshots):
            return FragmentSync(spec, snapshots, emit, self._clock_s, parts.overlap_steps)
        return PairSync(snapshots, emit, overlap=spec.sync.overlap)

    def run(self) -> None:
        """Obey and train until `Stop`.

        Raises:
            NonFinite, WrongCommand; torch's errors, out of memory among them.
        """
        while True:
            command = self._channel.next_command(wait=not self._can_train())
            if isinstance(command, Stop):
                return
            if command is not None:
                self._obey(command)
            elif (current := self._state.round) is not None:
                self._train_step(current)
            self._do_what_is_due()

    def _can_train(self) -> bool:
        current = self._state.round
        return current is not None and current.order.quota > 0 and not self._sync.holds_training

    def _do_what_is_due(self) -> None:
        """Send and merge; close the round, and the next one if it has no steps."""
        while True:
            if self._sync.is_send_due:
                self._settle()
            self._sync.advance()
            current = self._state.round
            if current is None or not current.is_due or self._sync.holds_close:
                return
            self._close(current)

    # --- commands -------------------------------------------------------------------------------

    def _obey(self, command: TrainerCommand) -> None:
        match command:
            case Load():
                self._load()
            case TrainRound():
                self._order(command)
            case CloseRound(round_):
                self._ask_to_close(round_)
            case Evaluate(round_):
                self._evaluate(round_)
            case Stop():
                pass  # `run` has seen to it
            case _:
                self._obey_sync(command)

    def _load(self) -> None:
        self._sync.load()
        self._parts.optimizer.reset()
        self._state = _State(loaded=True)

    def _order(self, order: TrainRound) -> None:
        state = self._state
        if not state.loaded:
            raise WrongCommand("TrainRound before Load")
        if order.quota < 0 or self._parts.peer_id not in dict(order.members):
            raise WrongCommand(f"round {order.round}: quota {order.quota}, or we are no member")
        if state.next_order is not None:
            raise WrongCommand(f"round {order.round}: round {state.next_order.round} waits already")
        if order.round <= (state.round.order.round if state.round else state.last_closed):
            raise WrongCommand(f"round {order.round} has been trained already")
        state.next_order = order
        if state.round is None:
            self._begin_round()

    def _begin_round(self) -> None:
        state = self._state
        if (order := state.next_order) is None:
            return
        now_s = self._clock_s()
        state.round = RoundInProgress(order, now_s, order.epoch, order.position)
        state.next_order = None
        state.progress = SinceProgress(now_s)
        self._sync.begin(order)

    def _ask_to_close(self, round_: int) -> None:
        current = self._state.round
        if current is not None and current.order.round == round_:
            current.close_asked = True
        elif round_ > self._state.last_closed:
            raise WrongCommand(f"CloseRound({round_}), a round that has not begun")

    def _obey_sync(self, command: SyncCommand) -> None:
        if not self._state.loaded:
            raise WrongCommand(f"{command} before Load")
        self._sync.obey(command)

    def _evaluate(self, round_: int) -> None:
        """Measure with the slow weights in place; the fast ones wait in the idle gradient."""
        started_s = self._clock_s()
        theta_P, scratch_P = self._parts.model.theta_P, self._parts.model.gradient_P
        scratch_P.copy_(theta_P)
        theta_P.copy_(self._parts.slow_P)
        loss = self._parts.stepper.loss_of(self._validation_BT)
        theta_P.copy_(scratch_P)
        scratch_P.zero_()
        tokens = self._validation_BT.shape[0] * (self._validation_BT.shape[1] - 1)
        self._channel.emit(Evaluated(round_, loss, tokens, self._clock_s() - started_s))

    # --- training -------------------------------------------------------------------------------

    def _train_step(self, current: RoundInProgress) -> None:
        started_s = self._clock_s()
        spec = self._parts.spec
        blocks_BT = self._take_blocks(current)
        step = nominal_step(
            current.order.round, spec.sync.inner_steps, current.steps, current.order.quota
        )
        total_steps = spec.total_rounds * spec.sync.inner_steps
        rate = learning_rate(spec.optimizer, step, total_steps, self._state.steps)
        launched = _Launched(self._parts.stepper.step(blocks_BT, rate), rate)
        # Its numbers are read one step later: until then a GPU computes while we prepare the next
        # one.
        self._settle()
        self._state.launched = launched
        self._state.steps += 1
        current.steps += 1
        current.tokens += spec.tokens_per_step
        self._sync.stepped(current.order, current.steps, spec.tokens_per_step)
        self._state.progress.busy_s += self._clock_s() - started_s
        self._report_progress(current)

    def _take_blocks(self, current: RoundInProgress) -> npt.NDArray[np.int64]:
        taken = self._plan.take(
            current.epoch,
            current.position,
            self._parts.spec.training.batch_size,
            self._parts.peer_id,
            current.order.members,
        )
        current.epoch, current.position = taken.epoch, taken.position
        return self._parts.corpus.blocks(taken.blocks)

    def _settle(self) -> None:
        """Look at the numbers of the launched step, if there is one."""
        current, launched = self._state.round, self._state.launched
        if current is None or launched is None:
            return
        self._state.launched = None
        try:
            loss, norm = launched.result.settled()
        except NonFinite as error:
            raise NonFinite(
                f"round {current.order.round}, step {current.steps}: {error}"
            ) from error
        current.loss_sum += loss
        self._state.gradient_norm = norm
        self._state.progress.steps += 1
        self._state.progress.loss_sum += loss

    def _report_progress(self, current: RoundInProgress) -> None:
        progress = self._state.progress
        now_s = self._clock_s()
        if not is_progress_due(current.steps, current.order.quota, now_s - progress.since_s):
            return
        launched = self._state.launched
        self._settle()
        settled_s = self._clock_s()
        progress.busy_s += settled_s - now_s
        self._channel.emit(
            Progress(
                round=current.order.round,
                steps=current.steps,
                tokens=current.tokens,
                loss=progress.loss_sum / max(1, progress.steps),
                learning_rate=launched.learning_rate if launched else 0.0,
                gradient_norm=self._state.gradient_norm,
                step_s=progress.busy_s / max(1, progress.steps),
            )
        )
        self._state.progress = SinceProgress(settled_s)

    # --- the close of a round -------------------------------------------------------------------

    def _close(self, current: RoundInProgress) -> None:
        self._settle()
        snapshot = self._sync.close(current.order)
        self._state.round = None
        self._state.last_closed = current.order.round
        self._channel.emit(
            RoundClosed(
                round=current.order.round,
                slot=snapshot.slot if snapshot else None,
                steps=current.steps,
                tokens=current.tokens,
                loss=current.loss_sum / max(1, current.steps),
                digest=snapshot.digest if snapshot else None,
                epoch=current.epoch,
                position=current.position,
                seconds=self._clock_s() - current.started_s,
            )
        )
        self._begin_round()
