"""The inner loop's decisions, without clock, model or channel: what is to be done next.

Theory. A trainer alternates between the daemon's commands and inner steps. The machine says what
comes next; its driver does that, and reports it. loop.py drives a model in a process of its own,
simulation/trainer.py a toy in virtual time.

    driver                              machine
    obey(command)
    next_action()                       does what is due, and says what comes next:
      ReadNumbers                       look at the numbers of the last step, then numbers_known()
      Evaluate(round)                   measure the slow weights, then measured()
      Try(fragment, cycle, blocks)      measure a merge, then measured()
      Keep(path)                        write the fast weights to a file, then kept()
      TrainStep(...)                    unless a command has come: train on blocks(), then stepped()
      Wait                              nothing to do until a command comes
      Stop                              the end
    takes `events` out                  for the daemon, in order

A round goes through:

    TrainRound(r)     steps, until `quota` are done or `CloseRound` came
    close             RoundClosed(r)

Sends and merges are the business of sync.py: it is told of each step, does what is due, and may
hold up training or the close.

Rules:
    1. A round is closed when it is due (quota done, or asked to close and at least one step done)
       and averaging does not hold it up. A due round that is held up trains on, but not past the
       end of the run: there a step of a stage would wait for relays that have ended.
    2. After k own steps of a round the nominal step is start_step + k * stride, past the quota
       too. The learning rate is the schedule's at that step, with the peak and end of the round's
       order; over the first own steps since `Load` it warms up (schedule.py).
    3. Nothing is trained while averaging holds it up. Commands are obeyed.
    4. The numbers of a step may become known when the next one has begun (a GPU computes while that
       is prepared), but before anything is sent, closed or told: `ReadNumbers` asks for them. So a
       number that is not finite ends the trainer before it is sent. (Nor is anything measured
       before, and the driver merges nothing, so that the rest of a step counts as its own time.)
    5. A command that makes no sense here is a bug of the daemon: `WrongCommand`, and the trainer
       ends.
    6. A round with quota 0 trains nothing: it is closed, at its start_step, as soon as nothing
       holds it up.
    7. `Load` begins anew: no round, no order, no step whose numbers are waited for.
    8. The numbers of the last step are read before weights are kept, so these are sound.
       After a `Load` of kept weights the driver sets `own_steps`: they go on, for the schedule.
    9. The daemon writes the slow weights only when no Load or Evaluate is on its way, and averaging
       does not read them.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.limits import EPSILON
from protocol.run.run_spec import RunSpec
from protocol.schedule.data_plan import DataPlan, TakenBlocks
from protocol.trainer_messages import Merge, Tried, Try, Yield

from . import messages
from .ports import WrongCommand
from .schedule import learning_rate, total_steps_of
from .sync import Sync


class RoundData:
    """Walks the plan by the steps of a round; `batch_size` is in blocks.

    The position does not depend on taking the blocks, so a trainer that needs no data looks at the
    plan once a round, not once a step.
    """

    def __init__(
        self, plan: DataPlan, peer_id: str, batch_size: int, order: messages.TrainRound
    ) -> None:
        self._plan = plan
        self._peer_id = peer_id
        self._batch_size = batch_size
        self._members = order.members
        self._epoch, self._position = order.epoch, order.position
        self._taken_steps = 0
        self._next: TakenBlocks | None = None

    def blocks(self, steps: int) -> npt.NDArray[np.int64]:
        """The blocks of the step after the first `steps` of the round; steps in order."""
        self.after(steps)
        self._next = self._next or self._take(1)
        return self._next.blocks

    def after(self, steps: int) -> tuple[int, int]:
        """Epoch and position after these steps of the round."""
        if left := steps - self._taken_steps:
            taken = self._next if self._next is not None and left == 1 else self._take(left)
            self._epoch, self._position, self._taken_steps = taken.epoch, taken.position, steps
            self._next = None
        return self._epoch, self._position

    def _take(self, steps: int) -> TakenBlocks:
        count = steps * self._batch_size
        return self._plan.take(self._epoch, self._position, count, self._peer_id, self._members)


@dataclass(slots=True)
class RoundInProgress:
    """A round, and how far it is.

    Attributes:
        awaits_numbers: the numbers of the last step are not known.
        is_asked_to_close: at once; but not without a step.
        learning_rate, gradient_norm: of the last step, and of the last whose numbers are known.
        untold_steps, untold_loss, untold_s: steps since `told_s` whose numbers are known, the sum
            of their losses, and the time of training.
    """

    order: messages.TrainRound
    data: RoundData
    tokens_per_step: int
    started_s: float
    told_s: float
    steps: int = 0
    awaits_numbers: bool = False
    is_progress_wanted: bool = False
    is_asked_to_close: bool = False
    loss_sum: float = 0.0
    learning_rate: float = 0.0
    gradient_norm: float = 0.0
    untold_steps: int = 0
    untold_loss: float = 0.0
    untold_s: float = 0.0

    @property
    def nominal_step(self) -> float:
        return self.order.start_step + self.order.stride * self.steps

    @property
    def is_due(self) -> bool:
        return self.steps >= self.order.quota or (self.is_asked_to_close and self.steps > 0)

    def is_at_end(self, total_steps: int) -> bool:
        """Whether it is due, and the run is at its end."""
        return self.is_due and (total_steps - self.nominal_step) / self.order.stride <= EPSILON

    def stepped(self, learning_rate: float, now_s: float, seconds: float) -> None:
        """Count a step that took so long; its numbers follow."""
        assert not self.awaits_numbers
        self.awaits_numbers = True
        self.steps += 1
        self.learning_rate = learning_rate
        self.untold_s += seconds
        is_half = self.steps == math.ceil(self.order.quota / 2)
        is_long_ago = now_s - self.told_s >= messages.PROGRESS_INTERVAL_S
        self.is_progress_wanted |= is_half or is_long_ago

    def numbers_known(self, loss: float, gradient_norm: float, seconds: float) -> None:
        """Take the numbers of the last step, which were waited for so long."""
        assert self.awaits_numbers
        self.awaits_numbers = False
        self.gradient_norm = gradient_norm
        self.loss_sum += loss
        self.untold_steps += 1
        self.untold_loss += loss
        self.untold_s += seconds

    def progress(self, now_s: float) -> messages.TrainerProgress:
        told = messages.TrainerProgress(
            round=self.order.round,
            steps=self.steps,
            loss=self.untold_loss / self.untold_steps,
            learning_rate=self.learning_rate,
            gradient_norm=self.gradient_norm,
            step_s=self.untold_s / self.untold_steps,
            step=self.nominal_step,
        )
        self.told_s, self.is_progress_wanted = now_s, False
        self.untold_steps, self.untold_loss, self.untold_s = 0, 0.0, 0.0
        return told

    def closed(self, now_s: float) -> messages.RoundClosed:
        epoch, position = self.data.after(self.steps)
        return messages.RoundClosed(
            round=self.order.round,
            steps=self.steps,
            tokens=self.steps * self.tokens_per_step,
            loss=self.loss_sum / max(1, self.steps),
            epoch=epoch,
            position=position,
            seconds=now_s - self.started_s,
            step=self.nominal_step,
        )


@dataclass(frozen=True, slots=True)
class TrainStep:
    """Train the step after the first `steps` of the round; it begins at `nominal_step`."""

    round: int
    steps: int
    nominal_step: float
    learning_rate: float


@dataclass(frozen=True, slots=True)
class ReadNumbers:
    """Look at the numbers of the last step."""


@dataclass(frozen=True, slots=True)
class Wait:
    """There is nothing to do until a command comes."""


Action = TrainStep | ReadNumbers | messages.Evaluate | Try | messages.Keep | Wait | messages.Stop


@dataclass(slots=True)
class _SinceLoad:
    """The state that `Load` makes new.

    Attributes:
        closed_at: nominal step, epoch and position at which the last round ended; before the first,
            where the weights stand.
    """

    loaded: bool = False
    round: RoundInProgress | None = None
    next_order: messages.TrainRound | None = None
    last_closed: int = -1
    closed_at: tuple[float, int, int] = (0.0, 0, 0)


@dataclass(eq=False)
class RoundMachine:
    """Says what the inner loop does next, from commands and finished steps.

    Args:
        events: of the machine and of `sync`; the driver takes them out.

    Attributes:
        own_steps: since `Load`, and those of the kept optimizer.
    """

    _spec: RunSpec
    _peer_id: str
    _plan: DataPlan
    _sync: Sync
    _events: deque[messages.TrainerEvent]

    def __post_init__(self) -> None:
        self._asked: deque[messages.Evaluate | Try | messages.Keep] = deque()
        self._stopped = False
        self._state = _SinceLoad()
        self.own_steps = 0

    # --- commands -------------------------------------------------------------------------------

    def obey(self, command: messages.TrainerCommand, now_s: float) -> None:
        """Take a command, between two steps. Raises WrongCommand."""
        match command:
            case messages.Load():
                self._sync.load()
                stand = command.step, command.epoch, command.position
                self._state = _SinceLoad(loaded=True, closed_at=stand)
                self.own_steps = 0
            case messages.TrainRound():
                self._take_order(command, now_s)
            case messages.CloseRound(round_):
                self._ask_to_close(round_)
            case messages.Evaluate() | messages.Keep():
                self._asked.append(command)
            case messages.Stop():
                self._stopped = True
            case Merge() | Try() | Yield():
                if not self._state.loaded:
                    raise WrongCommand(f"{command} before Load")
                self._sync.obey(command)
                if isinstance(command, Try):
                    self._asked.append(command)
            case _:
                raise WrongCommand(f"{command}, but no stage is trained here")

    def _take_order(self, order: messages.TrainRound, now_s: float) -> None:
        state = self._state
        if not state.loaded:
            raise WrongCommand("TrainRound before Load")
        if order.quota < 0 or self._peer_id not in dict(order.members):
            raise WrongCommand(f"round {order.round}: quota {order.quota}, or we are no member")
        if state.next_order is not None:
            raise WrongCommand(f"round {order.round}: round {state.next_order.round} waits already")
        if order.round <= (state.round.order.round if state.round else state.last_closed):
            raise WrongCommand(f"round {order.round} has been trained already")
        state.next_order = order
        if state.round is None:
            self._begin_round(now_s)

    def _ask_to_close(self, round_: int) -> None:
        current = self._state.round
        if current is not None and current.order.round == round_:
            current.is_asked_to_close = True
        elif round_ > self._state.last_closed:
            raise WrongCommand(f"CloseRound({round_}), a round that has not begun")

    # --- what comes next ------------------------------------------------------------------------

    def next_action(self, now_s: float) -> Action:
        """Tell, send, merge and close what is due; then say what comes next. Raises NonFinite."""
        if self._stopped:
            return messages.Stop()
        if self._asked:
            awaits_numbers = self._state.round is not None and self._state.round.awaits_numbers
            return ReadNumbers() if awaits_numbers else self._asked[0]
        while (current := self._state.round) is not None:
            if current.awaits_numbers and (
                current.is_progress_wanted or self._sync.is_send_due or self._closes(current)
            ):
                return ReadNumbers()
            if current.is_progress_wanted:
                self._events.append(current.progress(now_s))
            self._sync.advance()
            if not self._closes(current):
                return self._step_or_wait(current)
            self._close(current, now_s)
        self._sync.advance()
        return Wait()

    def _closes(self, current: RoundInProgress) -> bool:
        return current.is_due and not self._sync.holds_close

    def _step_or_wait(self, current: RoundInProgress) -> TrainStep | Wait:
        if current.order.quota == 0 or self._sync.holds_training:
            return Wait()
        step, total_steps = current.nominal_step, total_steps_of(self._spec, current.order)
        if current.is_at_end(total_steps):
            return Wait()
        section, peak = self._spec.optimizer, current.order.learning_rate
        if peak is not None and peak != section.learning_rate:
            section = section.model_copy(update={"learning_rate": peak})
        rate = learning_rate(section, step, total_steps, self.own_steps)
        return TrainStep(current.order.round, current.steps, step, rate)

    # --- what the driver has done ---------------------------------------------------------------

    def blocks(self) -> npt.NDArray[np.int64]:
        """Blocks of the step that comes next."""
        current = self._current
        return current.data.blocks(current.steps)

    def stepped(self, step: TrainStep, now_s: float, seconds: float) -> None:
        """Count a step that is done, or at least begun, in so many seconds; its numbers follow."""
        current = self._current
        current.stepped(step.learning_rate, now_s, seconds)
        if current.is_at_end(total_steps_of(self._spec, current.order)):
            current.is_progress_wanted = True  # nothing may follow at the end of the run
        self.own_steps += 1
        self._sync.stepped(current.order, current.steps, self._spec.tokens_per_step)

    def numbers_known(self, loss: float, gradient_norm: float, seconds: float) -> None:
        """Take the finite numbers of the last step, which were waited for so long."""
        self._current.numbers_known(loss, gradient_norm, seconds)

    def measured(self, result: messages.Evaluated | Tried) -> None:
        self._asked.popleft()
        self._events.append(result)

    def kept(self, error: str | None) -> None:
        """Tell that the fast weights are in the file, or why they are not."""
        order, current, stand = self._asked.popleft(), self._state.round, self._state.closed_at
        assert isinstance(order, messages.Keep)
        tokens = 0
        if current is not None:
            stand = (current.nominal_step, *current.data.after(current.steps))
            tokens = current.steps * self._spec.tokens_per_step
        self._events.append(messages.Kept(order.path, *stand, tokens, error))

    @property
    def _current(self) -> RoundInProgress:
        assert self._state.round is not None, "there is no round to train"
        return self._state.round

    def _begin_round(self, now_s: float) -> None:
        state, spec = self._state, self._spec
        if (order := state.next_order) is None:
            return
        data = RoundData(self._plan, self._peer_id, spec.training.batch_size, order)
        state.round = RoundInProgress(order, data, spec.tokens_per_step, now_s, told_s=now_s)
        state.next_order = None
        self._sync.begin(order)

    def _close(self, current: RoundInProgress, now_s: float) -> None:
        state = self._state
        self._sync.close(current.order)
        state.round = None
        state.last_closed = current.order.round
        closed = current.closed(now_s)
        state.closed_at = closed.step, closed.epoch, closed.position
        self._events.append(closed)
        self._begin_round(now_s)
