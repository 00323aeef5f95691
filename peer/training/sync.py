"""How the fast weights of the inner loop meet those of other peers: several ways, one shape.

`pairs.py` and `streaming.py` send fragments of them, at the close of a round or at their own
moments. The round machine asks its way of averaging at every turn.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch

from protocol.run.layout import Layout
from protocol.run.run_spec import RunSpec
from protocol.run.ways import WAYS

from .messages import SyncCommand, SyncEvent, TrainRound
from .shared import CodeRegions
from .weights import FastWeights


class Sync(Protocol):
    """The part of the trainer that answers `SyncCommand` with `SyncEvent`."""

    @property
    def holds_training(self) -> bool:
        """Whether nothing may be trained now."""

    @property
    def holds_close(self) -> bool:
        """Whether a round that is due must stay open."""

    @property
    def is_send_due(self) -> bool:
        """Whether `advance` will send: the weights must be known to be sound before."""

    def steps_to_event(self, order: TrainRound, steps: int) -> float:
        """Steps, after the round's `steps`-th, until `advance` has something to do."""

    def load(self) -> None:
        """theta := phi, and everything begins anew."""

    def obey(self, command: SyncCommand) -> None:
        """Take a command of averaging. Raises WrongCommand."""

    def begin(self, order: TrainRound) -> None:
        """A round begins."""

    def stepped(self, order: TrainRound, steps: int, tokens: int) -> None:
        """One more step of `tokens` tokens is done: the round's `steps`-th."""

    def advance(self) -> None:
        """Do what is due. Raises NonFinite."""

    def close(self, order: TrainRound) -> None:
        """A round is over: send what goes with its end. Raises NonFinite."""


class TrainerSide(Protocol):
    """A way of averaging on the trainer's side: what its module has (protocol/run/ways.py)."""

    def regions_of(self, spec: RunSpec, layout: Layout) -> tuple[int, ...]:
        """Bytes of each region of the shared memory for codes."""

    def snapshots_of(
        self, spec: RunSpec, weights: FastWeights, slow_P: torch.Tensor, regions: CodeRegions
    ) -> Any:
        """What is sent of these weights, and how averages come back into them."""

    def sync_of(
        self,
        spec: RunSpec,
        snapshots: Any,
        emit: Callable[[SyncEvent], None],
        clock_s: Callable[[], float],
    ) -> Sync:
        """What does that when it is due. `snapshots` are those of `snapshots_of`."""


def trainer_side(spec: RunSpec) -> TrainerSide:
    """The way of averaging of a run."""
    side: TrainerSide = import_module(WAYS[spec.sync.method].trainer)
    return side
