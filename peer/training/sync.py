"""How the fast weights of the inner loop meet those of other peers: two ways, one shape.

`pairs.py` takes one snapshot of all weights at the close of a round, `streaming.py` sends fragments
of them at their own moments. The loop trains, and asks its way of averaging at every turn.
"""

from typing import Protocol

from .messages import SyncCommand, TrainRound
from .snapshot import Snapshot


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
