"""Writes into a fragment's outer copy, and what they mean to the trainer.

One write at a time is under way. Results are judged by the ledger when their turn comes; what was
written is noted there when it has been. A chunk that must be healed first is asked for, and its
results are kept: they belong on top of it, however long the fetch takes.

The trainer is told of each chunk as stepped, moved or redone (cycle_machine.py). When a corrupted
chunk is healed the trainer is not told: a difference from corrupted phi means nothing, so theta is
left alone.

A step that is no longer believed (audits.py) is undone. The trainer is told nothing of a chunk in
flight, because it is as it was sent; any other was redone or moved, as it stepped.
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
class TrainerUpdate:
    """A message to the trainer about some writes, in the making, and until when these may begin.

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
        """The message for the trainer; no cycle for a fragment that it has yielded."""
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
        self._write: tuple[ChunkOrder, TrainerUpdate] | None = None
        self._on_top: deque[tuple[ResultArrived, TrainerUpdate]] = deque()
        self._after_healing: dict[int, dict[int, ResultArrived]] = defaultdict(dict)
        self._corrupted: set[int] = set()
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
        """The fragment was sent again: the states before the last steps are dropped."""
        self._ledger.sent()
        self._results = {}

    def verified(self, corrupted: Mapping[int, Stamp]) -> None:
        """These chunks are corrupted; their stamps are behind all others'."""
        for chunk, stamp in corrupted.items():
            self._ledger.healed(chunk, self._ledger.cycle(chunk), stamp)
            self._corrupted.add(chunk)

    def judge(self, item: ResultArrived) -> ResultVerdict:
        """Judge a result; a chunk that has to be healed is asked for, the result kept."""
        if not self._peers.believes(item.result):
            return ResultVerdict.IGNORE
        verdict = self._ledger.judge(item.chunk, item.cycle, item.of_chunk.base_stamp, item.rank)
        if verdict is ResultVerdict.HEAL:
            kept = self._after_healing[item.chunk]
            kept[item.cycle] = item
            while len(kept) > 2 * LATE_ROUNDS:  # those further apart are of another time
                del kept[min(kept)]
            known = [item.sender, *item.result.contributors_of(item.of_chunk)]
            source = next((each for each in known if each != self._peers.own_id), None)
            if source is not None:
                self._healing.request(item.chunk, source)
        return verdict

    def write_results(self, items: Sequence[ResultArrived], update: TrainerUpdate) -> None:
        """Write results for different chunks: one command for all, as each costs a thread."""
        judged = [(item, self.judge(item)) for item in items]
        again = frozenset(each.chunk for each, verdict in judged if verdict is ResultVerdict.REDO)
        wanted = tuple(
            each for each, verdict in judged if verdict is ResultVerdict.STEP or each.chunk in again
        )
        if wanted:
            self._begin(WriteResults(self._fragment, wanted, again, update.until_s), update)

    def write_chunk(self, item: ChunkFetched, update: TrainerUpdate) -> None:
        """Write a chunk, unless we have got further meanwhile."""
        ours = self._ledger.stamp(item.chunk)
        if item.stamp != ours and not ours.is_ahead_of(item.stamp):
            self._begin(WriteChunk(self._fragment, item, update.until_s), update)

    def undoable(self, item: Withdrawn) -> list[int]:
        """The chunks whose last step was an owner's, and can be taken back."""
        return [
            chunk
            for chunk, each in self._results.items()
            if each.result.owner == item.owner
            and not self._peers.believes(each.result)
            and self._ledger.can_undo(chunk)
        ]

    def undo(self, item: Withdrawn, update: TrainerUpdate) -> None:
        stamps = {chunk: self._ledger.before(chunk) for chunk in self.undoable(item)}
        if stamps:
            self._begin(UndoSteps(self._fragment, stamps, update.until_s), update)

    def write_on_top(self) -> None:
        item, update = self._on_top.popleft()
        self.write_results([item], update)

    def _begin(self, order: ChunkOrder, update: TrainerUpdate) -> None:
        self._write = order, update
        self._context.do(order)

    def written(self, stamps: Mapping[int, Stamp]) -> None:
        assert self._write is not None
        (order, update), self._write = self._write, None
        update.has_written |= bool(stamps)
        match order:
            case WriteChunk(fetched=item):
                if stamps:
                    self._note_chunk(item, update)
            case UndoSteps():
                for chunk in stamps:
                    self._note_undone(chunk, update)
            case WriteResults(results=results, again=again):
                for result in results:
                    if result.chunk in stamps:
                        redone = result.chunk in again
                        self._note_result(result, stamps[result.chunk], update, redone=redone)

    def _note_result(
        self, item: ResultArrived, stamp: Stamp, update: TrainerUpdate, *, redone: bool
    ) -> None:
        chunk = item.chunk
        self._results[chunk] = item
        update.contributors = max(update.contributors, len(item.of_chunk.places))
        if redone:
            self._ledger.redone(chunk, item.rank, stamp)
        else:
            self._ledger.stepped(chunk, item.cycle, item.rank, stamp)
        new_here = chunk in update.stepped or chunk not in update.moved
        if redone and chunk not in update.stepped | update.moved:
            update.redone.add(chunk)
        elif self._has_ours(item) and new_here:
            update.stepped.add(chunk)
        else:
            update.stepped.discard(chunk)
            update.moved.add(chunk)

    def _note_undone(self, chunk: int, update: TrainerUpdate) -> None:
        undone = self._results.pop(chunk)
        self._ledger.undone(chunk)
        if chunk in update.stepped:
            update.stepped.discard(chunk)
        elif chunk in update.moved:
            pass  # it was healed on the way, or is where it was sent: the same to the trainer
        elif self._has_ours(undone):
            update.redone.add(chunk)
        else:
            update.moved.add(chunk)

    def _note_chunk(self, item: ChunkFetched, update: TrainerUpdate) -> None:
        """The chunk is the other peer's; what came meanwhile goes on top of it, cycle by cycle."""
        chunk = item.chunk
        if chunk in self._corrupted:
            update = TrainerUpdate(update.until_s)  # of which the trainer is not told
        self._ledger.healed(chunk, item.cycle, item.stamp)
        self._corrupted.discard(chunk)
        update.stepped.discard(chunk)
        update.redone.discard(chunk)
        update.moved.add(chunk)
        kept = self._after_healing.pop(chunk, {})
        on_top = replace(update, contributors=0, has_written=False)  # the trainer is told of both
        self._on_top.extend((kept[cycle], on_top) for cycle in sorted(kept))

    def _has_ours(self, item: ResultArrived) -> bool:
        return self._peers.own_id in item.result.contributors_of(item.of_chunk)
