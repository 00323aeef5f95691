"""When checkpoints are written, and what goes into them.

    between two rounds, if it is time:
      wait a moment for averages under way     a peer alone has none; then the checkpoint is exact
      the trainer writes its part              training stands still, for a copy to system memory
      the outer vectors are copied             by a thread, at the same time
      the next round is trained                meanwhile digests, fsync, rename, removal of old ones

Where averages take longer, the outer vectors are copied first: the trainer's part may then hold a
move that they lack, as if the round had been longer; the other way round a move would be lost.

Nothing is written before the first step: the seed makes that again. A young run is worth little on
the disk and much to its user: the first three come one, two and five minutes after the start, or
later where writing takes more than a twentieth of the time; then one as often as was asked for. A
run that is over has its last checkpoint, and writes no other.

A checkpoint that cannot be written is told, and tried again soon; nothing else is lost.

The last one, of a peer that leaves, cannot wait: the trainer may be in a long step, wait for
microbatches that never come, or be starting. Without its part in time, the outer vectors are kept
alone, unless the newest checkpoint has them already: the moments are lost then, and the steps since
the last outer step.

The trainer writes its part to a file beside the checkpoint, another each time, which is moved in
when whole: a late trainer may write it when the checkpoint has been sealed without.

Copies elsewhere are made one at a time, always of the newest; the last of a peer that leaves is
waited for.

Disk space is checked before anything is trained: a run must not lose its model at its end. If not
even one checkpoint fits, the run is refused. If not all fit that are to be kept, the console says
so with numbers: files there may be deleted, and an optimizer may take less.
"""

import math
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import trio

from peer.averaging.parts import Averaging
from peer.content.pieces import PieceStore
from peer.facts import CheckpointOutcome, DiskFacts, HeldPart
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.options.needs_told import least_corpus_bytes
from peer.rounds.way import TrainerLine, Way
from peer.state.checkpoints import TRAINER_FILE, Checkpoint, CheckpointStore, Manifest, write_outer
from peer.state.home import HomeError
from peer.state.uploads import UploadFailed, Uploads
from peer.training.messages import Keep, Kept, Load
from peer.training.tensor_file import keep_nothing
from protocol.names import size_text
from protocol.run.needs import DiskNeeds, least_parameters_of
from protocol.run.run_spec import RunSpec

from .services import DaemonServices

# --- room on the disk -----------------------------------------------------------------------------


def check_room_to_begin(store: CheckpointStore, spec: RunSpec, data: str | None) -> None:
    """Check that one checkpoint fits beside the corpus, each at its least. Raises HomeError."""
    _refuse(store, store.needs(least_parameters_of(spec), least_corpus_bytes(spec, data)))


def check_room(
    store: CheckpointStore,
    padded_parameters: int,
    pieces: PieceStore | None,
    most_corpus_bytes: int,
    events: EventLog,
) -> None:
    """Check that checkpoints of `padded_parameters` fit beside the rest of the corpus.

    Args:
        pieces: of the corpus; None where all of it is here.

    Raises:
        HomeError: not even one fits; the message says what to do.
    """
    missing = 0
    if pieces is not None:
        missing = int(np.count_nonzero(~pieces.here)) * pieces.manifest.piece_bytes(0)
    needs = store.needs(padded_parameters, min(missing, most_corpus_bytes))
    _refuse(store, needs)
    there = free_bytes(store.directory) + store.held_bytes()
    if there < needs.total_bytes:
        what = f"checkpoints (--checkpoint-keep {store.keep}) and states for joiners"
        fewer = ", keep fewer with --checkpoint-keep 1" if store.keep > 1 else ""
        said = _sentence(store, needs, there, needs.total_bytes, what)
        events.emit(
            EventName.ROOM_FOUND_SMALL,
            detail=f"{said}. Free some space{fewer}, or use a larger disk with --home",
        )


def _refuse(store: CheckpointStore, needs: DiskNeeds) -> None:
    free = free_bytes(store.directory)
    if free < needs.least_bytes and not store.held_bytes():  # one that is there can be gone on from
        raise HomeError(
            f"{_sentence(store, needs, free, needs.least_bytes, 'one checkpoint')}. Free some"
            " space, or use a larger disk with --home"
        )


def _sentence(store: CheckpointStore, needs: DiskNeeds, free: int, wanted: int, what: str) -> str:
    corpus = needs.corpus_bytes
    rest = f", {size_text(corpus)} of them for the corpus" if corpus else ""
    return (
        f"{what} may take up to {size_text(wanted)} in {store.directory}{rest}, but only"
        f" {size_text(free)} are free"
    )


def free_bytes(folder: Path) -> int:
    """Free space of the disk that will hold this folder."""
    here = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(here).free


# --- one checkpoint -------------------------------------------------------------------------------


@dataclass(slots=True)
class Draft:
    """A checkpoint that is being made, and the trainer's part of it.

    Attributes:
        path: what the trainer writes; in no other ask.
        line: to the trainer; None where there is none now.
        until_s: the trainer is waited for.
        ended: set when it has written its part, or will not.
        stalled_s: how long no round was trained.
        missing: why the trainer's part is; empty where it is there.
        manifest: set when all is copied.
    """

    folder: Path
    path: Path
    line: TrainerLine | None
    started_s: float
    until_s: float
    ended: trio.Event = field(default_factory=trio.Event)
    kept: Kept | None = None
    stalled_s: float = 0.0
    missing: str = ""
    manifest: Manifest | None = None

    async def ask(self) -> None:
        if self.line is None:
            self.ended.set()
            return
        with trio.move_on_at(self.until_s):
            await self.line.send(Keep(str(self.path)))

    def on_kept(self, kept: Kept) -> None:
        """The trainer has answered a `Keep`, perhaps that of an earlier checkpoint."""
        if kept.path == str(self.path):
            self.kept = kept
            self.ended.set()

    async def wait(self) -> None:
        with trio.move_on_at(self.until_s):
            await self.ended.wait()
        if self.kept is not None:
            self.missing = self.kept.error or ""
        elif self.line is None:
            self.missing = "the trainer was starting"
        else:
            self.missing = "the trainer ended, or took too long, before it had written its part"

    def done_without(
        self,
        store: CheckpointStore,
        round_: int,
        standing: Kept,
        *,
        part: str | None = None,
        over: bool = False,
    ) -> Kept:
        """Put nothing in its place: a trainer then goes on from the slow weights.

        Args:
            round_: of the last outer step.
            standing: where the slow weights stand.
            part: of the model.
            over: the run is, which one before its end does not say.

        Raises:
            OSError: it would be a loss, or nothing: the message says which.
        """
        newest = next(store.newest_first(lambda *_: None, part), None)
        if round_ < 0:
            raise OSError(f"{self.missing}, and no round was over yet")
        is_later = newest is not None and newest.manifest.round >= round_
        if newest is not None and is_later and (newest.manifest.over or not over):
            raise OSError(f"{self.missing}; the newest checkpoint has all the rest, and stays")
        keep_nothing(self.folder / TRAINER_FILE)
        return standing

    def moved_in(self) -> Kept:
        """Raises OSError: the trainer has not written its part."""
        if self.kept is None or self.missing:
            raise OSError(self.missing)
        self.path.replace(self.folder / TRAINER_FILE)
        return self.kept


# --- when they are written ------------------------------------------------------------------------

SETTLE_S: Final = 1.0
"""How long averages under way are waited for, so that a checkpoint is exact."""
KEEP_S: Final = 300.0
"""How long the trainer may take to write its part."""
RETRY_S: Final = 60.0
"""After a checkpoint that could not be written."""
FIRST_AFTER_S: Final = (60.0, 120.0, 300.0)
"""When the first ones are due, where fewer were asked for, if they take LARGEST_SHARE at most."""
LARGEST_SHARE: Final = 0.05


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """How often checkpoints are written, and where copies go.

    Attributes:
        every_s: 0 writes one at the end alone, and when the peer leaves; None never.
    """

    every_s: float | None = None
    uploads: Uploads | None = None


class Checkpointing:
    """Writes checkpoints when they are due. Implements `peer.rounds.way.Checkpoints`."""

    def __init__(self, plan: CheckpointPlan, held: HeldPart, services: DaemonServices) -> None:
        self._plan = plan
        self._held = held
        self._services = services
        self._store = services.checkpoints
        self._facts = services.facts
        self._events = services.events
        self._work = services.work
        now_s, self._every_s = trio.current_time(), plan.every_s or math.inf
        self._first_s = [now_s + after_s for after_s in FIRST_AFTER_S if plan.every_s]
        self._due_s = self._next_s(0.0)
        self._has_last = False
        self._averaging: Averaging | None = None
        self._line: TrainerLine | None = None
        self._go_on: Path | None = None
        self._asked: Draft | None = None
        self._idle = trio.Event()
        self._idle.set()
        self._to_copy: Checkpoint | None = None
        self._copying = trio.Lock()
        self._uploads_data = False
        self._nursery: trio.Nursery | None = None
        self._began_step, self._asks = 0.0, 0
        self._way: Way | None = None

    def go_on_from(self, trainer_file: Path, *, over: bool) -> None:
        """Have the first trainer load this file; `over`: it is that of the end of the run."""
        self._go_on, self._has_last = trainer_file, over

    async def run(self, averaging: Averaging) -> None:
        if self._plan.every_s is None:
            return
        self._averaging, self._began_step = averaging, self._facts.nominal_step
        try:
            async with trio.open_nursery() as self._nursery:
                while True:
                    await trio.sleep(RETRY_S)
                    ended = self._facts.run_over and self._line is None
                    if self._way is not None and ended and not self._has_last:
                        await self.write_last(self._way, trio.current_time())
        finally:
            self._nursery = None

    # --- what the round loop says ---------------------------------------------------------------
    def load(self) -> Load:
        """The file to load, once; a trainer that dies loses its moments."""
        kept, self._go_on = self._go_on, None
        return Load() if kept is None else Load(str(kept))

    def on_trainer_started(self, line: TrainerLine) -> None:
        self._line = line

    def on_trainer_died(self) -> None:
        self._line = None
        if self._asked is not None:
            self._asked.ended.set()

    def on_kept(self, kept: Kept) -> None:
        if self._asked is not None:
            self._asked.on_kept(kept)

    async def between_rounds(self, way: Way) -> None:
        self._began_step = self._facts.nominal_step
        if trio.current_time() < self._due_s or not self._idle.is_set() or self._nursery is None:
            return
        draft = await self._copied(way, None)
        if draft is not None and self._nursery is not None:
            self._nursery.start_soon(self._seal, draft)

    async def write(self, way: Way) -> None:
        """Write one now, to the end; only once at the end of the run."""
        self._way = way
        await self._turn()
        await self._write(way, None)

    async def write_last(self, way: Way, until_s: float) -> None:
        """Write one to the end; without the trainer's part if that has not come until then."""
        with trio.move_on_at(until_s) as waiting:
            await self._turn()
        if waiting.cancelled_caught:
            self._tell_failed("the one before it was still being written")
            return
        await self._write(way, until_s)

    async def _write(self, way: Way, until_s: float | None) -> None:
        if self._facts.run_over and self._has_last:
            return
        draft = await self._copied(way, until_s)
        if draft is not None:
            await self._seal(draft)

    async def wait_copied(self, until_s: float) -> None:
        """Wait until what was written is copied elsewhere, but no longer than that.

        Storage that is far away may take hours, so the status says it.
        """
        uploads = self._plan.uploads
        if uploads is None or (self._to_copy is None and not self._copying.locked()):
            return
        self._facts.now_doing(f"copying the last checkpoint to {uploads.url}")
        with trio.move_on_at(until_s) as waiting:
            await self._copy_newest(uploads)
        if waiting.cancelled_caught:
            why = "the last checkpoint was not copied in time: --grace is too short"
            self._tell_failed(why, CheckpointOutcome.NOT_COPIED)

    async def _turn(self) -> None:
        """Wait until none is being written; where several wait, one begins."""
        while not self._idle.is_set():
            await self._idle.wait()

    def _next_s(self, took_s: float) -> float:
        now_s = trio.current_time()
        first_s = min((at_s for at_s in self._first_s if at_s > now_s), default=math.inf)
        return min(now_s + self._every_s, max(first_s, now_s + took_s / LARGEST_SHARE))

    # --- one checkpoint -------------------------------------------------------------------------
    async def _copied(self, way: Way, until_s: float | None) -> Draft | None:
        """Copy all that goes into it; None where that failed, or nothing is trained.

        Args:
            until_s: when the trainer's part is done without; None does not without it.
        """
        averaging = self._averaging
        keeps = self._plan.every_s is not None and self._facts.nominal_step > 0
        if not keeps or averaging is None or (self._line is None and until_s is None):
            return None
        self._idle = trio.Event()
        self._due_s = trio.current_time() + self._every_s
        try:
            return await self._copy(way, averaging, until_s)
        except OSError as error:
            await self._failed(error)
            return None
        except BaseException:
            self._idle.set()
            raise

    async def _copy(self, way: Way, averaging: Averaging, until_s: float | None) -> Draft:
        started_s, facts, group = trio.current_time(), self._facts, self._held.group
        line, wait_until_s = self._line, started_s + KEEP_S if until_s is None else until_s
        folder = await self._work.run(self._store.begin, averaging.slow_P.size)
        with trio.move_on_after(SETTLE_S) as waiting:
            await way.wait_idle()
        round_ = averaging.round
        self._asks += 1
        path = self._store.trainers_draft(self._asks)
        asked = self._asked = Draft(folder, path, line, started_s, wait_until_s)
        if not waiting.cancelled_caught:
            await asked.ask()
        await self._work.run(write_outer, folder, averaging.slow_P, averaging.momentum_P)
        if waiting.cancelled_caught:
            await asked.ask()
        await asked.wait()
        if until_s is not None and asked.missing:
            step = facts.nominal_step if facts.run_over else self._began_step
            slow = Kept(str(asked.path), step, facts.epoch, facts.position, 0)
            without = partial(asked.done_without, part=group.part, over=facts.run_over)
            kept = await self._work.run(without, self._store, round_, slow)
        else:
            kept = await self._work.run(asked.moved_in)
        asked.manifest = Manifest(
            run_id=group.run_id,
            part=group.part,
            layout_digest=self._held.shape.layout_digest,
            padded_parameters=averaging.slow_P.size,
            round=round_,
            step=kept.step,
            epoch=kept.epoch,
            position=kept.position,
            debt=facts.debt,
            tokens=facts.earlier_tokens + facts.tokens + kept.tokens,
            over=facts.run_over,
            written_s=self._services.directory.swarm_time_s(),
            version=self._services.version,
            files={},
        )
        asked.stalled_s = trio.current_time() - started_s
        return asked

    async def _seal(self, draft: Draft) -> None:
        assert draft.manifest is not None
        try:
            sealed, free = await self._work.run(self._sealed, draft.folder, draft.manifest)
        except OSError as error:
            await self._failed(error)
            return
        finally:
            self._idle.set()
        if sealed is None:  # one of a later step is there, and stays
            self._has_last = draft.manifest.over
            return
        seconds = trio.current_time() - draft.started_s
        self._due_s = min(self._due_s, self._next_s(seconds))
        self._has_last = sealed.manifest.over
        size = sum(file.bytes for file in sealed.manifest.files.values())
        self._facts.disk = DiskFacts(free, size)
        self._facts.checkpoints[CheckpointOutcome.WRITTEN] += 1
        self._facts.checkpoint_at_s = trio.current_time()
        self._events.emit(
            EventName.CHECKPOINT_WRITTEN,
            path=str(sealed.path),
            round=sealed.manifest.round,
            step=int(sealed.manifest.step),
            over=sealed.manifest.over,
            bytes=size,
            stalled_s=draft.stalled_s,
            seconds=seconds,
            missing=draft.missing or None,
        )
        if self._plan.uploads is not None:
            self._to_copy = sealed
            if self._nursery is not None:
                self._nursery.start_soon(self._upload, self._plan.uploads)

    def _sealed(self, folder: Path, manifest: Manifest) -> tuple[Checkpoint | None, int]:
        """The checkpoint, and what is free beside it. Raises OSError."""
        return self._store.seal(folder, manifest), free_bytes(self._store.directory)

    async def _upload(self, uploads: Uploads) -> None:
        """Copy the newest elsewhere, then the corpus, beside later ones: it may take hours."""
        await self._copy_newest(uploads)
        if self._uploads_data:
            return
        self._uploads_data = True
        try:
            check = self._work.check_cancelled
            await self._work.run(uploads.copy_data, check, may_be_cut_off=True)
        except UploadFailed as error:
            self._events.emit(EventName.CHECKPOINT_FAILED, detail=str(error))
        finally:
            self._uploads_data = False

    async def _copy_newest(self, uploads: Uploads) -> None:
        """Copy the newest elsewhere, when its turn comes, unless another call has."""
        async with self._copying:
            sealed, self._to_copy, started_s = self._to_copy, None, trio.current_time()
            if sealed is None:
                return
            try:
                where = await self._work.run(uploads.copy, sealed, may_be_cut_off=True)
            except UploadFailed as error:
                self._tell_failed(str(error), CheckpointOutcome.NOT_COPIED)
            else:
                seconds = trio.current_time() - started_s
                self._facts.checkpoints[CheckpointOutcome.COPIED] += 1
                self._events.emit(EventName.CHECKPOINT_COPIED, path=where, seconds=seconds)

    async def _failed(self, error: OSError) -> None:
        self._due_s = min(self._due_s, trio.current_time() + RETRY_S)
        self._facts.disk.refusal = str(error)
        self._tell_failed(str(error))
        try:
            await self._work.run(self._store.discard)
        finally:
            self._idle.set()

    def _tell_failed(self, why: str, outcome: CheckpointOutcome = CheckpointOutcome.FAILED) -> None:
        self._facts.checkpoints[outcome] += 1
        self._events.emit(EventName.CHECKPOINT_FAILED, detail=why)
