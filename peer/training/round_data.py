"""The blocks of one round, in the order of the data plan."""

import numpy as np
import numpy.typing as npt

from protocol.schedule.data_plan import DataPlan, TakenBlocks

from .messages import TrainRound


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
