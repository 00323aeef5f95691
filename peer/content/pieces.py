"""The pieces of a corpus on this machine, and fetching them before they are needed.

Pieces lie in one file, or one by one in a folder, where they appear whole or not at all. Each is
checked against the manifest when it is read, and removed if it differs.

The data plan says when a piece is needed (protocol/content/needs.py), and what others have said
that they have, of whom it is asked (protocol/content/scheduler.py).

    shares of a round  ->  CorpusNeeds  ->  Scheduler  ->  one stream for each request
    what others have   ------------------^       <---------  the piece, or that it did not come

Training waits only for pieces of its next step (`bring`). A peer that gave another piece, or was
too slow, is not asked for a while.

A disk that refuses a piece is no peer's fault. What has come stays in memory, MAX_ASKED pieces at
most, until the disk takes it; meanwhile nothing further is asked for.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import trio

from peer.observe.event_names import EventName
from peer.rounds.services import Services
from peer.runtime import PeerId
from peer.runtime.files import replace_file
from peer.training.corpus.blocks import PIECE_SUFFIX, Corpus, cut_piece, piece_path
from peer.training.corpus.folder import KeptCorpus
from protocol.content.manifest import CorpusManifest
from protocol.content.needs import CorpusNeeds, first_to_go, kept_pieces
from protocol.content.scheduler import AtOnce, BoolVector, Request, Scheduler
from protocol.errors import LocoError, Refused, RemoteProtocolError
from protocol.limits import MAX_ASKED
from protocol.membership.book import BackOff
from protocol.names import corpus_unheld
from protocol.schedule.data_plan import DataPlan, Members
from protocol.schedule.progress import TaskProgress

from .fetching import fetch_from

# --- pieces that are here -------------------------------------------------------------------------


@dataclass(eq=False)
class PieceStore:
    """Pieces of one corpus. Methods that touch the disk block: they run in `Work`.

    Attributes:
        here: which are here; bool [pieces].
        version: grows with each change of `here`; above 0.

    Args:
        whole: the corpus, where it is one file, which is not ours to change.
    """

    folder: Path
    manifest: CorpusManifest
    whole: Corpus | None = None
    version: int = 1

    def __post_init__(self) -> None:
        manifest = self.manifest
        self.here = np.full(manifest.num_pieces, self.whole is not None)
        for path in () if self.whole else self.folder.glob(f"*{PIECE_SUFFIX}"):
            name = path.name.removesuffix(PIECE_SUFFIX)
            if path.name.startswith("."):  # what was being written when the machine stopped
                path.unlink(missing_ok=True)
            elif name.isdecimal() and (piece := int(name)) < manifest.num_pieces:
                self.here[piece] = path.stat().st_size == manifest.piece_bytes(piece)

    @property
    def held_bytes(self) -> int:
        """Taken by what is here, about."""
        return int(np.count_nonzero(self.here)) * self.manifest.piece_bytes(0)

    def read(self, piece: int) -> bytes | None:
        """A piece, checked; one that is not there, or not it, is no longer `here`."""
        if self.whole is not None:
            data = cut_piece(self.whole.train, self.manifest, piece)
            return data if self.manifest.is_piece(piece, data) else None
        try:
            data = piece_path(self.folder, piece).read_bytes()
            if self.manifest.is_piece(piece, data):
                return data
            self.drop(piece)
        except OSError:  # what cannot be read or removed now is not here; it may be written again
            self._note(piece, is_here=False)
        return None

    def add(self, piece: int, data: bytes) -> None:
        """Keep a checked piece. Raises OSError."""
        replace_file(piece_path(self.folder, piece), data)
        self._note(piece, is_here=True)

    def drop(self, piece: int) -> None:
        """Remove its file; a trainer that has it open reads on. Raises OSError."""
        if self.whole is None:
            piece_path(self.folder, piece).unlink(missing_ok=True)
            self._note(piece, is_here=False)

    def _note(self, piece: int, *, is_here: bool) -> None:
        self.here[piece] = is_here
        self.version += 1


def open_store(kept: KeptCorpus) -> PieceStore:
    """The pieces of a corpus of the cache. Raises InvalidCorpus."""
    corpus = kept.open()
    return PieceStore(kept.folder, kept.manifest, corpus if isinstance(corpus, Corpus) else None)


# --- fetching -------------------------------------------------------------------------------------
ASK_EVERY_S: Final = 10.0
"""Between two questions to a peer which pieces it has; ASK_SOON_S while one is waited for."""
ASK_SOON_S: Final = 1.0
UNHELD_S: Final = 2 * ASK_EVERY_S
"""How long it takes to ask all peers for a piece that is waited for."""
PAUSE_S: Final = 5.0
"""After a peer did not give a piece; DOUBT_PAUSE_S where it gave another."""
DOUBT_PAUSE_S: Final = 300.0
DISK_PAUSE_S: Final = 60.0
"""Between two attempts to write what the disk refused: somebody has to make room first."""


@dataclass(eq=False)
class PieceFetcher:
    """Fetches the pieces that are needed next. Implements `DataFeed` (peer/rounds/).

    Args:
        first_blocks: how many of our blocks are fetched in the order in which they are trained.
        max_pieces: that may be here at once, beside those of `first_blocks`.
    """

    store: PieceStore
    data_plan: DataPlan
    services: Services
    _: KW_ONLY
    first_blocks: int
    max_pieces: float = math.inf

    def __post_init__(self) -> None:
        services, here = self.services, self.store.here
        self._network, self._work = services.network, services.work
        self._roster, self._facts, self._events = services.roster, services.facts, services.events
        self._scheduler = Scheduler(services.facts.peer_id, here)
        self._at_once = AtOnce(MAX_ASKED)
        self._needs: CorpusNeeds | None = None
        self._awaited: tuple[int, ...] = ()
        self._awaited_since_s = math.inf
        self._staying: tuple[int, ...] = ()
        self._kept = np.zeros(len(here), bool)
        self._refused: set[int] = set()
        """Pieces that the disk does not write, or remove."""
        self._refusal = ""
        self._versions: dict[PeerId, int] = {}
        self._waits = BackOff(PAUSE_S, PAUSE_S)
        self._changed = trio.Event()
        self._is_new = False
        self._note()

    # --- what the outer loop says -----------------------------------------------------------------
    def plan(self, members: Members, epoch: int, position: int) -> None:
        self._needs = CorpusNeeds(
            self.data_plan, epoch, position, self._facts.peer_id, members, self.first_blocks
        )
        self._wake(is_new=True)

    async def bring(self, pieces: Sequence[int]) -> None:
        """Returns when these pieces are here; they are fetched before all others."""
        self._awaited, self._awaited_since_s = tuple(pieces), trio.current_time()
        self._scheduler.wait_for(pieces)
        for piece in pieces:  # the trainer says that it is not, whatever we thought
            if self.store.here[piece]:
                await self._work.run(self.store.read, piece)
        self._wake(is_new=True)
        while not (here := self.store.here[list(pieces)]).all():
            came = int(np.count_nonzero(here))
            self._facts.progressed(TaskProgress("", came, len(here), "pieces"))
            await self._changed.wait()
        self._awaited, self._awaited_since_s = (), math.inf
        self._facts.corpus.unheld = ""
        self._scheduler.wait_for(())

    # --- the task ---------------------------------------------------------------------------------
    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._learn)
            while True:
                changed = self._changed
                if self._is_new:
                    self._is_new = False
                    await self._want()
                self._begin(nursery)
                await changed.wait()

    def _begin(self, nursery: trio.Nursery) -> None:
        now_s = trio.current_time()
        if self._refused:
            return
        for request in self._scheduler.next_requests(self._at_once.limit(now_s)):
            self._at_once.began(now_s)
            nursery.start_soon(self._fetch, request)

    async def _want(self) -> None:
        needs, me = self._needs, self._facts.peer_id
        alive = [member.peer_id for member in self._roster.alive(trio.current_time())]

        def wanted() -> tuple[Sequence[int], Sequence[int], BoolVector]:
            kept = kept_pieces(len(self.store.here), me, (*alive, me))
            return ((), (), kept) if needs is None else (needs.first, needs.soon, kept)

        first, soon, kept = await self._work.run(wanted)
        if self.max_pieces < math.inf:
            soon = soon[: max(0, int(self.max_pieces) - len(first))]
        self._staying, self._kept = (*self._awaited, *first, *soon), kept
        is_full = np.count_nonzero(self.store.here) >= self.max_pieces
        self._scheduler.want(first, soon, np.zeros_like(kept) if is_full else kept)

    async def _fetch(self, request: Request) -> None:
        data = await self._receive(request)
        if data is not None:
            await self._change_disk(request.item, partial(self.store.add, request.item, data))
            self._scheduler.came(request)
            self._facts.corpus.fetched_bytes += len(data)
            await self._make_room(request.item)
        self._note()
        self._wake()

    async def _receive(self, request: Request) -> bytes | None:
        ended = self._at_once.lost
        try:
            async with fetch_from(self._network, request.source) as fetcher:
                data = await fetcher.piece(self.store.manifest, request.item)
            ended = self._at_once.came
            return data
        except LocoError as error:
            if isinstance(error, Refused):
                ended = self._at_once.refused
            self._scheduler.failed(request)
            self._doubt(request.source, error)
            if isinstance(error, RemoteProtocolError):
                self._events.emit(
                    EventName.PIECE_FAILED,
                    remote=request.source,
                    piece=request.item,
                    detail=str(error),
                )
            return None
        finally:
            ended(trio.current_time())

    async def _change_disk(self, piece: int, change: Callable[[], None]) -> None:
        """Write or remove a piece, however long the disk refuses."""
        while True:
            try:
                await self._work.run(change)
            except OSError as error:
                self._refused.add(piece)
                refusal = self._facts.disk.refusal = error.strerror or str(error)
                if self._awaited:
                    sentence = f"waiting for a disk that keeps no pieces of the corpus: {refusal}"
                    self._facts.now_doing(sentence)
                if refusal != self._refusal:  # once, and not every minute
                    self._refusal = refusal
                    self._events.emit(EventName.DISK_REFUSED, piece=piece, detail=refusal)
                await trio.sleep(DISK_PAUSE_S)
            else:
                break
        self._refused.discard(piece)
        if self._refusal:
            self._refusal = self._facts.disk.refusal = ""

    def _doubt(self, peer_id: PeerId, error: Exception) -> None:
        """A peer that did not help has nothing for us for a while."""
        self._scheduler.gone(peer_id)
        self._versions.pop(peer_id, None)
        pause_s = DOUBT_PAUSE_S if isinstance(error, RemoteProtocolError) else PAUSE_S
        self._waits.failed(peer_id, trio.current_time(), pause_s)

    async def _make_room(self, newest: int) -> None:
        excess = np.count_nonzero(self.store.here) - self.max_pieces
        needs = self._needs
        if excess <= 0 or needs is None:
            return
        held, staying = np.flatnonzero(self.store.here), (*self._staying, newest)
        going = await self._work.run(
            lambda: first_to_go(held, needs.distance(), self._kept, staying)
        )
        for piece in going[: int(excess)]:
            await self._change_disk(piece, partial(self.store.drop, piece))

    # --- what others have -------------------------------------------------------------------------
    async def _learn(self) -> None:
        questions = trio.CapacityLimiter(MAX_ASKED)  # of peers, at once
        while True:
            now_s = trio.current_time()
            alive = {member.peer_id for member in self._roster.alive(now_s)}
            for peer_id in self._versions.keys() - alive:
                self._scheduler.gone(peer_id)
                del self._versions[peer_id]
            async with trio.open_nursery() as nursery:
                for peer_id in sorted(alive - {self._facts.peer_id}):
                    if self._waits.is_due(peer_id, now_s):
                        nursery.start_soon(self._ask, peer_id, questions)
            self._note()
            self._tell_unheld(sorted(alive))
            self._wake(is_new=True)
            waits = self._awaited or not self._versions
            await trio.sleep(ASK_SOON_S if waits else ASK_EVERY_S)

    async def _ask(self, peer_id: PeerId, questions: trio.CapacityLimiter) -> None:
        try:
            async with questions, fetch_from(self._network, peer_id) as fetcher:
                known = self._versions.get(peer_id, 0)
                version, pieces = await fetcher.holdings(self.store.manifest, known)
        except Refused:
            pass  # busy: what it had it has
        except LocoError as error:
            self._doubt(peer_id, error)
        else:
            self._versions[peer_id] = version
            if pieces is not None:
                self._scheduler.holds(peer_id, pieces)
                self._wake()

    def _tell_unheld(self, asked: Sequence[PeerId]) -> None:
        """Say which pieces training waits for that nobody has; in events once for each wait."""
        nobody_has = self._scheduler.copies == 0
        pieces = [p for p in self._awaited if nobody_has[p] and not self.store.here[p]]
        corpus, was = self._facts.corpus, self._facts.corpus.unheld
        corpus.unheld = ""
        if pieces and trio.current_time() - self._awaited_since_s >= UNHELD_S:
            what = f"{len(pieces)} pieces"
            corpus.unheld = corpus_unheld(what, self._facts.expert, asked)
            if not was:
                self._events.emit(
                    EventName.CORPUS_UNHELD, detail=corpus.unheld, remotes=list(asked)
                )

    def _note(self) -> None:
        facts, here = self._facts.corpus, self.store.here
        facts.pieces, facts.here = len(here), int(np.count_nonzero(here))
        facts.only_here = int(np.count_nonzero(here & (self._scheduler.copies == 0)))

    def _wake(self, *, is_new: bool = False) -> None:
        self._is_new |= is_new
        self._changed.set()
        self._changed = trio.Event()
