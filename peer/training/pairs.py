"""Averaging in pairs, the trainer's side: one snapshot at the close of each round.

Rules
  1. While a snapshot is pending no round is closed.
  2. With `overlap` off, nothing is trained while a snapshot is pending.
"""

import math
from collections.abc import Callable

import torch

from peer.codec import get_codec
from protocol.run.layout import Layout
from protocol.run.run_spec import RunSpec

from .errors import WrongCommand
from .messages import Applied, Apply, SyncCommand, SyncEvent, TrainRound
from .shared import NUM_SLOTS, CodeRegions
from .snapshot import Snapshot, Snapshots
from .weights import FastWeights


class PairSync:
    """See the rules above. Implements `peer.training.sync.Sync`."""

    def __init__(
        self,
        snapshots: Snapshots,
        emit: Callable[[SyncEvent], None],
        clock_s: Callable[[], float],
        *,
        overlap: bool,
    ) -> None:
        self._snapshots = snapshots
        self._emit = emit
        self._clock_s = clock_s
        self._overlap = overlap
        self._taking_s = 0.0

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
        started_s = self._clock_s()
        distance = self._snapshots.apply()
        pause_s = self._taking_s + self._clock_s() - started_s
        self._emit(Applied(command.round, distance, pause_s))

    def begin(self, order: TrainRound) -> None:
        """Nothing to do."""

    def stepped(self, order: TrainRound, steps: int, tokens: int) -> None:
        """Nothing to do."""

    def advance(self) -> None:
        """Nothing to do."""

    def close(self, order: TrainRound) -> Snapshot:
        """Take the round's snapshot. Raises NonFinite."""
        started_s = self._clock_s()
        snapshot = self._snapshots.take(order.round)
        self._taking_s = self._clock_s() - started_s
        return snapshot


def regions_of(spec: RunSpec, layout: Layout) -> tuple[int, ...]:
    """Two slots for the codes of all weights."""
    return (get_codec(spec.sync.codec).code_bytes(layout.padded_parameters),) * NUM_SLOTS


def snapshots_of(
    spec: RunSpec, weights: FastWeights, slow_P: torch.Tensor, regions: CodeRegions
) -> Snapshots:
    """Snapshots of all weights."""
    return Snapshots(weights, slow_P, regions, get_codec(spec.sync.codec))


def sync_of(
    spec: RunSpec,
    snapshots: Snapshots,
    emit: Callable[[SyncEvent], None],
    clock_s: Callable[[], float],
    overlap_steps: int | None,  # noqa: ARG001 - all ways have one shape (sync.py)
) -> PairSync:
    """What takes one snapshot at the close of each round."""
    return PairSync(snapshots, emit, clock_s, overlap=spec.sync.overlap)
