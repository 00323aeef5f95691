"""What is written into a fragment's outer copy, and what that means to the trainer.

One write at a time is under way. Results are judged by the ledger when their turn comes
(protocol/fragment/chunk_ledger.py); what was written is noted there when it has been. A chunk that
must be healed first is asked for, and its results are kept: they belong on top of it, however long
the fetch takes.

The trainer is told of each chunk as stepped, moved or redone (cycle_machine.py). Of a chunk whose
memory was spoilt it is told nothing when it is healed: the way from a spoilt phi leads nowhere, and
theta stays where it is.

What an owner made that is believed no more (audits.py) is undone: of a chunk in flight the trainer
is told nothing, for it is as it was sent; of any other, that it was redone or moved, as it stepped.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from msgspec import structs

from protocol.fragment.chunk_ledger import ChunkLedger, ResultVerdict, Stamp
from protocol.trainer_messages import Merge
from protocol.wire.fragment_messages import Result

from .commands import (
    ChunkFetched,
    ResultArrived,
    ResultToWrite,
    UndoSteps,
    Withdrawn,
    WriteChunk,
    WriteResults,
)
from .healing import Healing
from .peers import Context

MAX_AFTER_HEALING: Final = 8
"""Results kept for a chunk that is being fetched."""


@dataclass(slots=True)
class Occasion:
    """Why something is written: a flight, or something that came at another time.

    Attributes:
        until_s: what could not be begun by then is not written.
        stepped, moved, redone: chunks that changed, by what the trainer has to do about them.
        contributors: peers in a result that was written, at most.
        has_written: whether anything was.
    """

    until_s: float = math.inf
    stepped: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    redone: set[int] = field(default_factory=set)
    contributors: int = 0
    has_written: bool = False

    def merge(self, fragment: int, cycle: int | None) -> Merge:
        """What the trainer is told of it; no cycle for a fragment that it has yielded."""
        of_kind = map(sorted, (self.stepped, self.moved, self.redone))
        return Merge(fragment, cycle, *map(tuple, of_kind))


@dataclass(frozen=True, slots=True)
class _Write:
    """What is being written, and where to note what the trainer has to do about it."""

    what: ChunkFetched | Withdrawn | Sequence[tuple[ResultArrived, ResultVerdict]]
    occasion: Occasion
    told: Occasion


class ChunkWrites:
    """Decides what a result or a chunk that has come changes in the outer copy and the trainer."""

    def __init__(
        self, fragment: int, ledger: ChunkLedger, healing: Healing, context: Context
    ) -> None:
        self._fragment = fragment
        self._context = context
        self._peers = context.peers
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
        return structs.replace(kept.result, carried=(chunk,)), kept.codes

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
    def judge(self, item: ResultArrived) -> ResultVerdict:
        """What a result means; a chunk that has to be healed is asked for, the result kept."""
        chunk, result = item.chunk, item.result
        if not self._peers.believes(result):
            return ResultVerdict.IGNORE
        verdict = self._ledger.judge(chunk.chunk, result.cycle, chunk.base_stamp, item.rank)
        if verdict is ResultVerdict.HEAL:
            kept = self._after_healing[chunk.chunk]
            kept[result.cycle] = item
            while len(kept) > MAX_AFTER_HEALING:
                del kept[min(kept)]
            known = [item.sender, *result.contributors_of(chunk)]
            source = next((each for each in known if each != self._peers.own_id), None)
            if source is not None:
                self._healing.wish(chunk.chunk, source)
        return verdict

    def write_results(self, items: Sequence[ResultArrived], occasion: Occasion) -> None:
        """Write results for different chunks: one command for all, as each costs a thread."""
        judged = [(item, self.judge(item)) for item in items]
        wanted = [each for each in judged if each[1] in (ResultVerdict.STEP, ResultVerdict.REDO)]
        if wanted:
            self._write = _Write(wanted, occasion, occasion)
            results = tuple(self._to_write(item, verdict) for item, verdict in wanted)
            self._context.do(WriteResults(self._fragment, results, occasion.until_s))

    def write_chunk(self, item: ChunkFetched, occasion: Occasion) -> None:
        """Write a chunk of another peer, unless we have got further meanwhile."""
        ours = self._ledger.stamp(item.chunk)
        if item.stamp == ours or ours.is_ahead_of(item.stamp):
            return
        told = Occasion(occasion.until_s) if item.chunk in self._spoilt else occasion
        self._write = _Write(item, occasion, told)
        self._context.do(WriteChunk(self._fragment, item, occasion.until_s))

    def undoable(self, item: Withdrawn) -> list[int]:
        """The chunks whose last step was an owner's, and can be taken back."""
        return [
            chunk
            for chunk, each in self._results.items()
            if each.result.owner == item.owner
            and not self._peers.believes(each.result)
            and self._ledger.can_undo(chunk)
        ]

    def undo(self, item: Withdrawn, occasion: Occasion) -> None:
        """Take these steps back, if there are any."""
        chunks = self.undoable(item)
        if chunks:
            self._write = _Write(item, occasion, occasion)
            stamps = {chunk: self._ledger.before(chunk) for chunk in chunks}
            self._context.do(UndoSteps(self._fragment, stamps, occasion.until_s))

    def write_on_top(self) -> None:
        """Write the next result on top of a chunk that was fetched."""
        item, occasion = self._on_top.popleft()
        self.write_results([item], occasion)

    def _to_write(self, item: ResultArrived, verdict: ResultVerdict) -> ResultToWrite:
        chunk, again = item.chunk.chunk, verdict is ResultVerdict.REDO
        base = self._ledger.before(chunk) if again else self._ledger.stamp(chunk)
        return ResultToWrite(chunk, item.result.cycle, base, item.rank, item.codes, again)

    # --- what was written -------------------------------------------------------------------------
    def written(self, stamps: Mapping[int, Stamp]) -> None:
        """Note the end of the write that is under way, and the new stamps."""
        assert self._write is not None
        write, self._write = self._write, None
        write.occasion.has_written |= bool(stamps)
        match write.what:
            case ChunkFetched():
                if stamps:
                    self._note_chunk(write.what, write.told)
            case Withdrawn():
                for chunk in stamps:
                    self._note_undone(chunk, write.told)
            case results:
                for item, verdict in results:
                    if item.chunk.chunk in stamps:
                        self._note_result(item, verdict, stamps[item.chunk.chunk], write.told)

    def _note_result(
        self, item: ResultArrived, verdict: ResultVerdict, stamp: Stamp, told: Occasion
    ) -> None:
        """Where the chunk is now, and what the trainer has to do about it."""
        chunk = item.chunk.chunk
        self._results[chunk] = item
        told.contributors = max(told.contributors, len(item.chunk.places))
        if verdict is ResultVerdict.STEP:
            self._ledger.stepped(chunk, item.result.cycle, item.rank, stamp)
        else:
            self._ledger.redone(chunk, item.rank, stamp)
        new_here = chunk in told.stepped or chunk not in told.moved
        if verdict is ResultVerdict.REDO and chunk not in told.stepped | told.moved:
            told.redone.add(chunk)
        elif self._has_ours(item) and new_here:
            told.stepped.add(chunk)
        else:
            told.stepped.discard(chunk)
            told.moved.add(chunk)

    def _note_undone(self, chunk: int, told: Occasion) -> None:
        """The chunk is where it was before its last step."""
        undone = self._results.pop(chunk)
        self._ledger.undone(chunk)
        if chunk in told.stepped:
            told.stepped.discard(chunk)
        elif chunk in told.moved:
            pass  # it was healed on the way, or is where it was sent: the same to the trainer
        elif self._has_ours(undone):
            told.redone.add(chunk)
        else:
            told.moved.add(chunk)

    def _note_chunk(self, item: ChunkFetched, told: Occasion) -> None:
        """The chunk is the other peer's; what came meanwhile goes on top of it, cycle by cycle."""
        self._ledger.healed(item.chunk, item.cycle, item.stamp)
        self._spoilt.discard(item.chunk)
        told.stepped.discard(item.chunk)
        told.redone.discard(item.chunk)
        told.moved.add(item.chunk)
        kept = self._after_healing.pop(item.chunk, {})
        on_top = replace(told, contributors=0, has_written=False)  # the trainer is told of both
        self._on_top.extend((kept[cycle], on_top) for cycle in sorted(kept))

    def _has_ours(self, item: ResultArrived) -> bool:
        return self._peers.own_id in item.result.contributors_of(item.chunk)
