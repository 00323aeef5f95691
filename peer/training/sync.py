"""How the fast weights of the inner loop meet those of other peers: two ways, one shape.

`pairs.py` takes one snapshot of all weights at the close of a round, `streaming.py` sends fragments
of them at their own moments. The round machine asks its way of averaging at every turn.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from peer.codec import get_codec
from protocol.fragment.fragments import fragments_of_run
from protocol.run.run_spec import RunSpec

from .fragments import FragmentSnapshots
from .messages import SyncCommand, SyncEvent, TrainRound
from .pairs import PairSync
from .shared import CodeRegions
from .snapshot import Snapshot, Snapshots
from .streaming import FragmentSync
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
        """Raises WrongCommand."""

    def begin(self, order: TrainRound) -> None:
        """A round begins."""

    def stepped(self, order: TrainRound, steps: int, tokens: int) -> None:
        """One more step of `tokens` tokens is done: the round's `steps`-th."""

    def advance(self) -> None:
        """Do what is due. Raises NonFinite."""

    def close(self, order: TrainRound) -> Snapshot | None:
        """A round is over: the snapshot that is sent, if that is the way. Raises NonFinite."""


def snapshots_of_run(
    spec: RunSpec, weights: FastWeights, slow_P: torch.Tensor, regions: CodeRegions
) -> Snapshots | FragmentSnapshots:
    """What a run sends of these weights, and takes back from the slow ones."""
    codec, diloco = get_codec(spec.sync.codec), spec.sync.diloco
    if diloco is None:
        return Snapshots(weights, slow_P, regions, codec)
    fragments = fragments_of_run(diloco, weights.layout)
    return FragmentSnapshots(weights, slow_P, regions, codec, fragments, diloco)


def sync_of_run(
    spec: RunSpec,
    snapshots: Snapshots | FragmentSnapshots,
    emit: Callable[[SyncEvent], None],
    clock_s: Callable[[], float],
    overlap_steps: int | None = None,
) -> Sync:
    """The way of averaging of a run.

    Args:
        overlap_steps: tau of this peer, with fragments; None is the run's.
    """
    if isinstance(snapshots, FragmentSnapshots):
        return FragmentSync(spec, snapshots, emit, clock_s, overlap_steps)
    return PairSync(snapshots, emit, overlap=spec.sync.overlap)
