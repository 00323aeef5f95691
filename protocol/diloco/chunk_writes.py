"""What is written into a fragment's outer copy, and what that means to the trainer.

One write at a time is under way. Results are judged by the ledger when their turn comes
(protocol/fragment/chunk_ledger.py); what was written is noted there when it has been. A chunk that
must be healed first is asked for, and its results are kept: they belong on top of it, however long
the fetch takes.

The trainer is told of each chunk as stepped, moved or redone (keeper.py). Of a chunk whose memory
was spoilt it is told nothing when it is healed: the way from a spoilt phi leads nowhere, and theta
stays where it is.

What an owner made that is believed no more (audits.py) is undone: of a chunk in flight the trainer
is told nothing, for it is as it was sent; of any other, that it was redone or moved, as it stepped.
"""

import math
from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from protocol.fragment.chunk_ledger import ChunkLedger, ResultVerdict, Stamp
from protocol.wire.fragment_messages import Result

from .fragment_events import (
    AskStamps,
    Changes,
    ChunkFetched,
    FetchChunk,
    ResultArrived,
    ResultToWrite,
    UndoSteps,
    Withdrawn,
    WriteChunk,
    WriteResults,
)
from .healing import Healing
from .peers import Peers

MAX_AFTER_HEALING: Final = 8
"""Results kept for a chunk that is being fetched."""

Output = Iterator[WriteResults | WriteChunk | UndoSteps | FetchChunk | AskStamps]


@dataclass(slots=True)
class Occasion:
    """Why something is written: a flight, or something that came at another time.

    Attributes:
        until_s: what could not be begun by then is not written.
        changes: what the trainer has to do.
        contributors: peers in a result that was written, at most.
        has_written: whether anything was.
    """

    until_s: float = math.inf
    changes: Changes = field(default_factory=Changes)
    contributors: int = 0
    has_written: bool = False


@dataclass(frozen=True, slots=True)
class _Write:
    """What is being written, and where to note what the trainer has to do about it."""

    what: ChunkFetched | Withdrawn | tuple[tuple[ResultArrived, ResultVerdict], ...]
    occasion: Occasion
    changes: Changes


class ChunkWrites:
    """See the top of the file."""

    def __init__(self, fragment: int, peers: Peers, ledger: ChunkLedger, healing: Healing) -> None:
        self._fragment = fragment
        self._peers = peers
        self._own_id = peers.own_id
        self._ledger = ledger
        self._healing = healing
        self._write: _Write | None = None
        self._on_top: deque[tuple[ResultArrived, Occasion]] = deque()
        self._after_healing: dict[int, dict[int, ResultArrived]] = defaultdict(dict)
        self._spoilt: set[int] = set()
        self._results: dict[int, ResultArrived] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a write is under way."""
        return self._write is not None

    @property
    def has_more(self) -> bool:
        """Whether results are to be written on top of a chunk that was fetched."""
        return bool(self._on_top)

    def contributors_by_chunk(self) -> dict[int, int]:
        """The number of peers in the result of each chunk, of the last cycle."""
        return {chunk: len(each.chunk.places) for chunk, each in self._results.items()}

    def result_of(self, cycle: int, chunk: int) -> tuple[Result, memoryview] | None:
        """The result that we applied to a chunk in this cycle, with its codes and no others."""
        kept = self._results.get(chunk)
        if kept is None or kept.result.cycle != cycle:
            return None
        return replace(kept.result, carried=(chunk,)), kept.codes

    def sent(self) -> None:
        """The fragment was sent again: its last steps stand."""
        self._ledger.sent()
        self._results = {}

    def verified(self, spoilt: Mapping[int, Stamp]) -> None:
        """These chunks are no longer what was written; their stamps are behind all others'."""
        for chunk, stamp in spoilt.items():
            self._ledger.healed(chunk, self._ledger.cycle(chunk), stamp)
            self._spoilt.add(chunk)

    # --- what is to be written --------------------------------------------------------------------
    def judge(
        self, now_s: float, item: ResultArrived
    ) -> Generator[FetchChunk | AskStamps, None, ResultVerdict]:
        """What a result means; a chunk that has to be healed is asked for, the result kept."""
        chunk, result = item.chunk, item.result
        if not self._peers.believes(result):
            return ResultVerdict.IGNORE
        verdict = self._ledger.judge(
            chunk.chunk, result.cycle, chunk.base_stamp, result.outcome(chunk)
        )
        if verdict is ResultVerdict.HEAL:
            self._keep_for_after_healing(item)
            known = [item.sender, *result.contributors_of(chunk)]
            source = next((peer_id for peer_id in known if peer_id != self._own_id), None)
            if source is not None:
                yield from self._healing.wish(now_s, chunk.chunk, source)
        return verdict

    def write_results(
        self, now_s: float, items: Sequence[ResultArrived], occasion: Occasion
    ) -> Output:
        """Write results for different chunks: one command for all, as each costs a thread."""
        wanted = []
        for item in items:
            verdict = yield from self.judge(now_s, item)
            if verdict in (ResultVerdict.STEP, ResultVerdict.REDO):
                wanted.append((item, verdict))
        if wanted:
            self._write = _Write(tuple(wanted), occasion, occasion.changes)
            results = tuple(self._to_write(item, verdict) for item, verdict in wanted)
            yield WriteResults(self._fragment, results, occasion.until_s)

    def write_chunk(self, item: ChunkFetched, occasion: Occasion) -> Output:
        """Write a chunk of another peer, unless we have got further meanwhile."""
        ours = self._ledger.stamp(item.chunk)
        if item.stamp == ours or ours.is_ahead_of(item.stamp):
            return
        changes = Changes() if item.chunk in self._spoilt else occasion.changes
        self._write = _Write(item, occasion, changes)
        yield WriteChunk(
            self._fragment, item.chunk, item.cycle, item.stamp, item.values, occasion.until_s
        )

    def undoable(self, item: Withdrawn) -> list[int]:
        """The chunks whose last step was an owner's, and can be taken back."""
        return [
            chunk
            for chunk, each in self._results.items()
            if each.result.owner == item.owner
            and not self._peers.believes(each.result)
            and self._ledger.can_undo(chunk)
        ]

    def undo(self, item: Withdrawn, occasion: Occasion) -> Output:
        """Take these steps back, if there are any."""
        chunks = self.undoable(item)
        if chunks:
            self._write = _Write(item, occasion, occasion.changes)
            stamps = {chunk: self._ledger.before(chunk) for chunk in chunks}
            yield UndoSteps(self._fragment, stamps, occasion.until_s)

    def write_on_top(self, now_s: float) -> Output:
        """Write the next result on top of a chunk that was fetched."""
        item, occasion = self._on_top.popleft()
        yield from self.write_results(now_s, [item], occasion)

    def _to_write(self, item: ResultArrived, verdict: ResultVerdict) -> ResultToWrite:
        chunk, again = item.chunk.chunk, verdict is ResultVerdict.REDO
        base = self._ledger.before(chunk) if again else self._ledger.stamp(chunk)
        outcome = item.result.outcome(item.chunk)
        return ResultToWrite(chunk, item.result.cycle, base, outcome, item.codes, again)

    def _keep_for_after_healing(self, item: ResultArrived) -> None:
        kept = self._after_healing[item.chunk.chunk]
        kept[item.result.cycle] = item
        while len(kept) > MAX_AFTER_HEALING:
            del kept[min(kept)]

    # --- what was written -------------------------------------------------------------------------
    def written(self, stamps: Mapping[int, Stamp]) -> None:
        """Note the end of the write that is under way, and the new stamps."""
        assert self._write is not None
        write, self._write = self._write, None
        write.occasion.has_written |= bool(stamps)
        if isinstance(write.what, ChunkFetched):
            if stamps:
                self._note_chunk(write.what, write.occasion.until_s, write.changes)
            return
        if isinstance(write.what, Withdrawn):
            for chunk in stamps:
                self._note_undone(chunk, write.changes)
            return
        for item, verdict in write.what:
            if item.chunk.chunk in stamps:
                self._note_result(item, verdict, stamps[item.chunk.chunk], write.changes)
                in_it = len(item.chunk.places)
                write.occasion.contributors = max(write.occasion.contributors, in_it)

    def _note_result(
        self, item: ResultArrived, verdict: ResultVerdict, stamp: Stamp, changes: Changes
    ) -> None:
        """Where the chunk is now, and what the trainer has to do about it."""
        chunk, outcome = item.chunk.chunk, item.result.outcome(item.chunk)
        self._results[chunk] = item
        if verdict is ResultVerdict.STEP:
            self._ledger.stepped(chunk, item.result.cycle, outcome, stamp)
        else:
            self._ledger.redone(chunk, outcome, stamp)
        new_here = chunk in changes.stepped or chunk not in changes.moved
        if verdict is ResultVerdict.REDO and chunk not in changes.stepped | changes.moved:
            changes.redone.add(chunk)
        elif self._own_id in item.result.contributors_of(item.chunk) and new_here:
            changes.stepped.add(chunk)
        else:
            changes.stepped.discard(chunk)
            changes.moved.add(chunk)

    def _note_undone(self, chunk: int, changes: Changes) -> None:
        """The chunk is where it was before its last step."""
        undone = self._results.pop(chunk)
        self._ledger.undone(chunk)
        if chunk in changes.stepped:
            changes.stepped.discard(chunk)
        elif chunk in changes.moved:
            pass  # it was healed on the way, or is where it was sent: the same to the trainer
        elif self._own_id in undone.result.contributors_of(undone.chunk):
            changes.redone.add(chunk)
        else:
            changes.moved.add(chunk)

    def _note_chunk(self, item: ChunkFetched, until_s: float, changes: Changes) -> None:
        """The chunk is the other peer's; what came meanwhile goes on top of it, cycle by cycle."""
        self._ledger.healed(item.chunk, item.cycle, item.stamp)
        self._spoilt.discard(item.chunk)
        changes.stepped.discard(item.chunk)
        changes.redone.discard(item.chunk)
        changes.moved.add(item.chunk)
        kept = self._after_healing.pop(item.chunk, {})
        self._on_top.extend((kept[cycle], Occasion(until_s, changes)) for cycle in sorted(kept))
