"""The trainer's part of one checkpoint: asked for, waited for, and perhaps done without.

It is written beside the checkpoint, each time to a file of its own, and moved in when it is whole:
a trainer that was waited for too long may write it when the checkpoint has been sealed without.
"""

from dataclasses import dataclass, field
from pathlib import Path

import trio

from peer.rounds.way import TrainerLine
from peer.state.checkpoints import TRAINER_FILE, CheckpointStore
from peer.training.kept import keep_nothing
from peer.training.messages import Keep, Kept


@dataclass(slots=True)
class TrainersPart:
    """What the trainer is asked to write, and what it has said.

    Attributes:
        folder: of the checkpoint.
        path: what the trainer writes; in no other ask.
        line: to the trainer; None where there is none now.
        until_s: it is waited for.
        ended: set when it has written its part, or will not.
    """

    folder: Path
    path: Path
    line: TrainerLine | None
    until_s: float
    ended: trio.Event = field(default_factory=trio.Event)
    kept: Kept | None = None

    async def ask(self) -> None:
        """Ask it to write, if it is there and listens."""
        if self.line is None:
            self.ended.set()
            return
        with trio.move_on_at(self.until_s):
            await self.line.send(Keep(str(self.path)))

    def took(self, kept: Kept) -> None:
        """The trainer has written something, or has not; perhaps for an earlier checkpoint."""
        if kept.path == str(self.path):
            self.kept = kept
            self.ended.set()

    async def wait(self) -> None:
        """Wait until it is written, or will not be in time."""
        with trio.move_on_at(self.until_s):
            await self.ended.wait()

    @property
    def missing(self) -> str:
        """Why it is; empty when it is there."""
        if self.kept is not None:
            return self.kept.error or ""
        if self.line is None:
            return "the trainer was starting"
        return "the trainer ended, or took too long, before it had written its part"

    def done_without(
        self, store: CheckpointStore, round_: int, standing: Kept, *, over: bool = False
    ) -> Kept:
        """Put nothing in its place: a trainer then goes on from the slow weights.

        Args:
            store: of all checkpoints.
            round_: of the last outer step.
            standing: where the slow weights stand.
            over: the run is, which one before its end does not say.

        Raises:
            OSError: it would be a loss, or nothing: the message says which.
        """
        newest = next(store.newest_first(lambda *_: None), None)
        if round_ < 0:
            raise OSError(f"{self.missing}, and no round was over yet")
        is_later = newest is not None and newest.manifest.round >= round_
        if newest is not None and is_later and (newest.manifest.over or not over):
            raise OSError(f"{self.missing}; the newest checkpoint has all the rest, and stays")
        keep_nothing(self.folder / TRAINER_FILE)
        return standing

    def moved_in(self) -> Kept:
        """What the trainer said of its part, which is in the folder now. Raises OSError."""
        if self.kept is None or self.kept.error is not None:
            raise OSError(self.missing)
        self.path.replace(self.folder / TRAINER_FILE)
        return self.kept
