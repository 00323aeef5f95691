"""Writes into a fragment's outer copy, and what they mean to the trainer.

One write at a time is under way. Results are judged by the ledger when their turn comes; what was
written is noted there when it has been. A chunk that must be healed first is asked for, and its
results are kept: they belong on top of it, however long the fetch takes.

The trainer is told of each chunk as stepped, moved or redone (cycle_machine.py). It is told nothing
of a chunk whose memory was spoilt when that is healed: the way from a spoilt phi leads nowhere, and
theta stays where it is.

A step that is believed no more (audits.py) is undone. The trainer is told nothing of a chunk in
flight, for it is as it was sent; any other was redone or moved, as it stepped.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from protocol.trainer_messages import Merge
from protocol.wire.fragment_messages import Result, Stamp

from .chunk_ledger import ChunkLedger, ResultVerdict
from .commands import ChunkFetched, ResultArrived, UndoSteps, Withdrawn, WriteChunk, WriteResults
from .healing import Healing
from .peers import LATE_ROUNDS, Context

ChunkOrder = WriteResults | WriteChunk | UndoSteps


@dataclass(slots=True)
class Occasion:
    """Why something is written: a flight, or something that came at another time.

    Attributes:
        until_s: what could not be begun by then is not written.
        stepped, moved, redone: chunks that changed, by what the trainer has to do about them.
        contributors: peers in a result that was written, at most.
    """

    until_s: float = math.inf
    stepped: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    redone: set[int] = field(default_factory=set)
    contributors: int = 0
    has_written: bool = False

    def merge(self, fragment: int, cycle: int | None) -> Merge:
        """For the trainer; no cycle for a fragment that it has yielded."""
        of_kind = map(sorted, (self.stepped, self.moved, self.redone))
        return Merge(fragment, cycle, *map(tuple, of_kind))


class ChunkWrites:
    def __init__(
        self, fragment: int, ledger: ChunkLedger, healing: Healing, context: Context
    ) -> None:
        self._fragment = fragment
        self._context = context
        self._peers = context.peers
        self._ledger = ledger
        self._healing = healing
        self._write: tuple[ChunkOrder, Occasion] | None = None
        self._on_top: deque[tuple[ResultArrived, Occasion]] = deque()
        self._after_healing: dict[int, dict[int, ResultArrived]] = defaultdict(dict)
        self._spoilt: set[int] = set()
        self._results: dict[int, ResultArrived] = {}

    @property
    def is_busy(self) -> bool:
        return self._write is not None

    @property
    def has_more(self) -> bool:
        """Whether results are to be written on top of a chunk that was fetched."""
        return bool(self._on_top)

    def result_of(self, cycle: int, chunk: int) -> tuple[Result, memoryview] | None:
        """The result that we applied to a chunk in this cycle, with its codes and no others."""
        kept = self._results.get(chunk)
        if kept is None or kept.cycle != cycle:
            return None
        return structs.replace(kept.result, carried=(chunk,)), kept.codes

    def sent(self) -> None:
        """The last steps stand."""
        self._ledger.sent()
        self._results = {}

    def verified(self, spoilt: Mapping[int, Stamp]) -> None:
        """These chunks are spoilt; their stamps are behind all others'."""
        for chunk, stamp in spoilt.items():
            self._ledger.healed(chunk, self._ledger.cycle(chunk), stamp)
            self._spoilt.add(chunk)

    def judge(self, item: ResultArrived) -> ResultVerdict:
        """Judge a result; a chunk that has to be healed is asked for, the result kept."""
        if not self._peers.believes(item.result):
            return ResultVerdict.IGNORE
        verdict = self._ledger.judge(item.chunk, item.cycle, item.of_chunk.base_stamp, item.rank)
        if verdict is ResultVerdict.HEAL:
            kept = self._after_healing[item.chunk]
            kept[item.cycle] = item
            while len(kept) > 2 * LATE_ROUNDS:  # from so many on they are of another time
                del kept[min(kept)]
            known = [item.sender, *item.result.contributors_of(item.of_chunk)]
            source = next((each for each in known if each != self._peers.own_id), None)
            if source is not None:
                self._healing.wish(item.chunk, source)
        return verdict

    def write_results(self, items: Sequence[ResultArrived], occasion: Occasion) -> None:
        """Write results for different chunks: one command for all, as each costs a thread."""
        judged = [(item, self.judge(item)) for item in items]
        again = frozenset(each.chunk for each, verdict in judged if verdict is ResultVerdict.REDO)
        wanted = tuple(
            each for each, verdict in judged if verdict is ResultVerdict.STEP or each.chunk in again
        )
        if wanted:
            self._begin(WriteResults(self._fragment, wanted, again, occasion.until_s), occasion)

    def write_chunk(self, item: ChunkFetched, occasion: Occasion) -> None:
        """Write a chunk, unless we have got further meanwhile."""
        ours = self._ledger.stamp(item.chunk)
        if item.stamp != ours and not ours.is_ahead_of(item.stamp):
            self._begin(WriteChunk(self._fragment, item, occasion.until_s), occasion)

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
        stamps = {chunk: self._ledger.before(chunk) for chunk in self.undoable(item)}
        if stamps:
            self._begin(UndoSteps(self._fragment, stamps, occasion.until_s), occasion)

    def write_on_top(self) -> None:
        item, occasion = self._on_top.popleft()
        self.write_results([item], occasion)

    def _begin(self, order: ChunkOrder, occasion: Occasion) -> None:
        self._write = order, occasion
        self._context.do(order)

    def written(self, stamps: Mapping[int, Stamp]) -> None:
        assert self._write is not None
        (order, occasion), self._write = self._write, None
        occasion.has_written |= bool(stamps)
        match order:
            case WriteChunk(fetched=item):
                if stamps:
                    self._note_chunk(item, occasion)
            case UndoSteps():
                for chunk in stamps:
                    self._note_undone(chunk, occasion)
            case WriteResults(results=results, again=again):
                for result in results:
                    if result.chunk in stamps:
                        redone = result.chunk in again
                        self._note_result(result, stamps[result.chunk], occasion, redone=redone)

    def _note_result(
        self, item: ResultArrived, stamp: Stamp, told: Occasion, *, redone: bool
    ) -> None:
        chunk = item.chunk
        self._results[chunk] = item
        told.contributors = max(told.contributors, len(item.of_chunk.places))
        if redone:
            self._ledger.redone(chunk, item.rank, stamp)
        else:
            self._ledger.stepped(chunk, item.cycle, item.rank, stamp)
        new_here = chunk in told.stepped or chunk not in told.moved
        if redone and chunk not in told.stepped | told.moved:
            told.redone.add(chunk)
        elif self._has_ours(item) and new_here:
            told.stepped.add(chunk)
        else:
            told.stepped.discard(chunk)
            told.moved.add(chunk)

    def _note_undone(self, chunk: int, told: Occasion) -> None:
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

    def _note_chunk(self, item: ChunkFetched, occasion: Occasion) -> None:
        """The chunk is the other peer's; what came meanwhile goes on top of it, cycle by cycle."""
        chunk = item.chunk
        told = Occasion(occasion.until_s) if chunk in self._spoilt else occasion
        self._ledger.healed(chunk, item.cycle, item.stamp)
        self._spoilt.discard(chunk)
        told.stepped.discard(chunk)
        told.redone.discard(chunk)
        told.moved.add(chunk)
        kept = self._after_healing.pop(chunk, {})
        on_top = replace(told, contributors=0, has_written=False)  # the trainer is told of both
        self._on_top.extend((kept[cycle], on_top) for cycle in sorted(kept))

    def _has_ours(self, item: ResultArrived) -> bool:
        return self._peers.own_id in item.result.contributors_of(item.of_chunk)
