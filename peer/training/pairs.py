"""Averaging in pairs, the trainer's side: one snapshot at the close of each round.

Rules
  1. While a snapshot is pending no round is closed.
  2. With `overlap` off, nothing is trained while a snapshot is pending.
"""

import math
from collections.abc import Callable

from .errors import WrongCommand
from .messages import Applied, Apply, SyncCommand, SyncEvent, TrainRound
from .snapshot import Snapshot, Snapshots


class PairSync:
    """See the rules above. Implements `peer.training.sync.Sync`."""

    def __init__(
        self, snapshots: Snapshots, emit: Callable[[SyncEvent], None], *, overlap: bool
    ) -> None:
        self._snapshots = snapshots
        self._emit = emit
        self._overlap = overlap

    def __repr__(self) -> str:
        return f"<PairSync, {self._snapshots!r}>"

    @property
    def holds_training(self) -> bool:
        """Whether nothing may be trained now (rule 2)."""
        return not self._overlap and self.holds_close

    @property
    def holds_close(self) -> bool:
        """Whether a snapshot is pending (rule 1)."""
        return self._snapshots.pending is not None

    @property
    def is_send_due(self) -> bool:
        """Never: `close` sends."""
        return False

    def steps_to_event(self, order: TrainRound, steps: int) -> float:
        """Never."""
        return math.inf

    def load(self) -> None:
        """theta := phi, nothing is pending."""
        self._snapshots.load()

    def obey(self, command: SyncCommand) -> None:
        """Take `Apply`. Raises WrongCommand."""
        if not isinstance(command, Apply):
            raise WrongCommand(f"{command}, but this run averages in pairs")
        pending = self._snapshots.pending
        if pending is None or pending.round != command.round:
            raise WrongCommand(f"Apply({command.round}), but {pending or 'nothing'} is pending")
        self._emit(Applied(command.round, self._snapshots.apply()))

    def begin(self, order: TrainRound) -> None:
        """Nothing to do."""

    def stepped(self, order: TrainRound, steps: int, tokens: int) -> None:
        """Nothing to do."""

    def advance(self) -> None:
        """Nothing to do."""

    def close(self, order: TrainRound) -> Snapshot:
        """Take the round's snapshot. Raises NonFinite."""
        return self._snapshots.take(order.round)
