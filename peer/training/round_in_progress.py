"""What is known of the round that is being trained, and what is told of it."""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from protocol.schedule.data_plan import DataPlan, TakenBlocks

from .messages import PROGRESS_INTERVAL_S, Progress, RoundClosed, TrainRound

# --- the blocks of one round, in the order of the data plan ---------------------------------------


class RoundData:
    """Walks the plan by the steps of a round.

    Nobody has to take the blocks: the position after so many steps is the same. So a trainer that
    needs no data looks at the plan once a round, not once a step.

    Args:
        peer_id: ourselves in the members of the round.
        batch_size: blocks of a step.
    """

    def __init__(self, plan: DataPlan, peer_id: str, batch_size: int, order: TrainRound) -> None:
        self._plan = plan
        self._peer_id = peer_id
        self._batch_size = batch_size
        self._members = order.members
        self._epoch, self._position = order.epoch, order.position
        self._taken_steps = 0
        self._next: TakenBlocks | None = None

    def blocks(self, steps: int) -> npt.NDArray[np.int64]:
        """Those of the step that follows on the first `steps` of the round; steps in order.

        They may be asked for again as long as that step is not done.
        """
        self._pass_over(steps)
        if self._next is None:
            self._next = self._taken(1)
        return self._next.blocks

    def after(self, steps: int) -> tuple[int, int]:
        """Epoch and position after so many steps."""
        self._pass_over(steps)
        return self._epoch, self._position

    def _pass_over(self, steps: int) -> None:
        if steps > self._taken_steps and self._next is not None:
            self._pass(self._next, 1)
        if steps > self._taken_steps:
            left = steps - self._taken_steps
            self._pass(self._taken(left), left)

    def _taken(self, steps: int) -> TakenBlocks:
        count = steps * self._batch_size
        return self._plan.take(self._epoch, self._position, count, self._peer_id, self._members)

    def _pass(self, taken: TakenBlocks, steps: int) -> None:
        self._epoch, self._position = taken.epoch, taken.position
        self._taken_steps += steps
        self._next = None


# --- round in progress ----------------------------------------------------------------------------


@dataclass(slots=True)
class _Told:
    """Steps since the last `Progress`: those whose numbers are known, and what training took."""

    since_s: float
    steps: int = 0
    loss_sum: float = 0.0
    busy_s: float = 0.0


@dataclass(slots=True)
class RoundInProgress:
    """A round, and how far it is.

    Attributes:
        unsettled: the numbers of the last step are not known.
        is_progress_wanted: it is time to tell.
        close_at_steps: own steps after which it closes because it was asked to; None if it was not.
        learning_rate, gradient_norm: of the last step, and of the last whose numbers are known.
    """

    order: TrainRound
    data: RoundData
    tokens_per_step: int
    started_s: float
    steps: int = 0
    unsettled: bool = False
    is_progress_wanted: bool = False
    close_at_steps: int | None = None
    loss_sum: float = 0.0
    learning_rate: float = 0.0
    gradient_norm: float = 0.0
    _told: _Told = field(init=False)

    def __post_init__(self) -> None:
        """Nothing has been told."""
        self._told = _Told(self.started_s)

    @property
    def nominal_step(self) -> float:
        """The nominal step that has been reached."""
        return self.order.start_step + self.order.stride * self.steps

    @property
    def steps_to_due(self) -> int:
        """Steps until it can be closed; none or less when it can."""
        due = self.order.quota
        if self.close_at_steps is not None:
            due = min(due, self.close_at_steps)
        return due - self.steps

    def steps_to(self, total_steps: int) -> int:
        """Steps until it is due and at the end of the run; none or less when it is."""
        to_end = math.ceil((total_steps - self.nominal_step) / self.order.stride - 1e-6)
        return max(self.steps_to_due, to_end)

    def ask_to_close(self) -> None:
        """Close it at once; but not without a step."""
        asked = max(1, self.steps)
        self.close_at_steps = min(asked, self.close_at_steps or asked)

    def stepped(self, learning_rate: float, now_s: float, seconds: float) -> None:
        """One more step is done, which took so long; its numbers follow."""
        assert not self.unsettled
        self.unsettled = True
        self.steps += 1
        self.learning_rate = learning_rate
        self._told.busy_s += seconds
        is_half = self.steps == math.ceil(self.order.quota / 2)
        is_long_ago = now_s - self._told.since_s >= PROGRESS_INTERVAL_S
        self.is_progress_wanted |= is_half or is_long_ago

    def settled(self, loss: float, gradient_norm: float, seconds: float) -> None:
        """The numbers of the last step are known; they were waited for so long."""
        assert self.unsettled
        self.unsettled = False
        self.gradient_norm = gradient_norm
        self.loss_sum += loss
        self._told.steps += 1
        self._told.loss_sum += loss
        self._told.busy_s += seconds

    def steps_to_progress(self, end_s: float, step_s: float) -> int:
        """Steps to the next `Progress`, if the next ends at `end_s` and each takes `step_s`."""
        wait_s = self._told.since_s + PROGRESS_INTERVAL_S - end_s
        usual = max(1, 1 + math.ceil(wait_s / step_s - 1e-6))
        to_half = math.ceil(self.order.quota / 2) - self.steps
        return min(usual, to_half) if to_half > 0 else usual

    def progress(self, now_s: float) -> Progress:
        """What is told of it now."""
        told, self._told = self._told, _Told(now_s)
        self.is_progress_wanted = False
        return Progress(
            round=self.order.round,
            steps=self.steps,
            tokens=self.steps * self.tokens_per_step,
            loss=told.loss_sum / told.steps,
            learning_rate=self.learning_rate,
            gradient_norm=self.gradient_norm,
            step_s=told.busy_s / told.steps,
            step=self.nominal_step,
        )

    def closed(self, now_s: float) -> RoundClosed:
        """What is told of its end."""
        epoch, position = self.data.after(self.steps)
        return RoundClosed(
            round=self.order.round,
            steps=self.steps,
            tokens=self.steps * self.tokens_per_step,
            loss=self.loss_sum / max(1, self.steps),
            epoch=epoch,
            position=position,
            seconds=now_s - self.started_s,
            step=self.nominal_step,
        )
