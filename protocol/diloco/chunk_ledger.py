"""Which state each chunk is in, and what a result that arrives means for it.

Idea. Everybody holds the same outer copy, although nobody hands it out: each peer applies the same
results to the same values with the same arithmetic. A chunk's state is named by a *stamp*, and a
result says to which stamp it is to be applied. A peer sees from any header whether it is where the
others are, and every difference has a winner that all agree on.

Rules
  1. A stamp is (outer steps taken, weight admitted in all of them, digest of values and momentum).
     One with more steps is ahead, then one with more weight: a chunk that went on with more peers
     has learnt more. Between equals the next result decides, whose owner has seen how many stand on
     which (collecting.py): a peer that is not on its base heals, if more than one peer stands
     there, or if there its digest is lower than ours. (The majority's bytes never move for one peer
     whose memory was corrupted; two peers that differ have no majority, and the digest breaks the
     tie.)
  2. Of two results for one chunk and cycle, on the same base, the larger weight wins, then the
     lower digest of the codes. Any result is better than no result.
  3. The state before the last step is kept until the fragment is sent again. Until then a winning
     result replaces the one that was applied (redo).
  4. A result on a base that is not ours: if that base is right (rule 1), we are the ones that
     differ, and take the chunk from a peer that has it (heal); else it is for others to heal.
  5. A cycle is never stepped twice, and none before the last: what comes for an older cycle is
     over.
  6. A step whose result is no longer believed is undone while the state before is kept (rule 3).
     The cycle is over then, without a step.
  7. No honest state has more than one step for each cycle until then, and in each step more weight
     than that of all contributors that there can be.

Invariant: two peers that had equal stamps and have seen the same set of results, each before its
next send of the fragment, have equal stamps, in whatever order the results came.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from protocol.errors import LocalProtocolError
from protocol.limits import MAX_CONTRIBUTION_WEIGHT, MAX_CONTRIBUTORS
from protocol.wire.fragment_messages import ResultRank, Stamp

NEVER: Final = -1
"""Cycle of a chunk without a step."""


def can_be(stamp: Stamp, cycle: int) -> bool:
    """Whether a state after this cycle, or NEVER, can have such a stamp (rule 7)."""
    most = MAX_CONTRIBUTORS * MAX_CONTRIBUTION_WEIGHT
    return stamp.steps <= cycle + 1 and stamp.weight <= stamp.steps * most


class ResultVerdict(Enum):
    STEP = "step"
    """Apply it to the present state."""
    REDO = "redo"
    """Apply it to the state before the last step, in place of what was applied there."""
    HEAL = "heal"
    """Take the chunk's state from the peer that made or sent it."""
    IGNORE = "ignore"


@dataclass(slots=True)
class _ChunkEntry:
    stamp: Stamp
    cycle: int = NEVER
    before: Stamp | None = None
    before_cycle: int = NEVER
    applied: ResultRank | None = None
    over: int = NEVER
    undone: bool = False


class ChunkLedger:
    def __init__(self, stamps: Iterable[Stamp]) -> None:
        self._entries = [_ChunkEntry(stamp) for stamp in stamps]

    def stamp(self, chunk: int) -> Stamp:
        return self._entries[chunk].stamp

    def cycle(self, chunk: int) -> int:
        """Cycle of its last step; NEVER before the first."""
        return self._entries[chunk].cycle

    def before(self, chunk: int) -> Stamp:
        """The state before its last step. Raises LocalProtocolError: it was let go."""
        before = self._entries[chunk].before
        if before is None:
            raise LocalProtocolError(f"chunk {chunk} has no step that could be redone")
        return before

    @property
    def stamps(self) -> list[Stamp]:
        return [entry.stamp for entry in self._entries]

    @property
    def cycles(self) -> list[int]:
        return [entry.cycle for entry in self._entries]

    def judge(self, chunk: int, cycle: int, base: Stamp, outcome: ResultRank) -> ResultVerdict:
        """Judge a result for this chunk (rules 2 to 5)."""
        entry = self._entries[chunk]
        if cycle < entry.cycle or cycle <= entry.over:
            return ResultVerdict.IGNORE
        if cycle > entry.cycle:
            return _on_base(base, entry.stamp, outcome, ResultVerdict.STEP)
        if entry.before is None or entry.applied is None:
            return ResultVerdict.IGNORE
        if base == entry.before and not outcome.wins_over(entry.applied):
            return ResultVerdict.IGNORE
        return _on_base(base, entry.before, outcome, ResultVerdict.REDO)

    def stepped(self, chunk: int, cycle: int, outcome: ResultRank, stamp: Stamp) -> None:
        """A result was applied to the present state, which became `stamp`."""
        entry = self._entries[chunk]
        if cycle <= entry.cycle:
            raise LocalProtocolError(f"chunk {chunk} was stepped in cycle {entry.cycle} already")
        entry.before, entry.stamp = entry.stamp, stamp
        entry.before_cycle, entry.cycle, entry.applied = entry.cycle, cycle, outcome

    def redone(self, chunk: int, outcome: ResultRank, stamp: Stamp) -> None:
        """A winning result took the place of the one applied."""
        self.before(chunk)  # must be kept
        entry = self._entries[chunk]
        entry.applied, entry.stamp = outcome, stamp

    def can_undo(self, chunk: int) -> bool:
        return self._entries[chunk].before is not None

    def undone(self, chunk: int) -> None:
        """The last step was taken back (rule 6)."""
        stamp, entry = self.before(chunk), self._entries[chunk]
        over = max(entry.over, entry.cycle)
        self._entries[chunk] = _ChunkEntry(stamp, entry.before_cycle, over=over, undone=True)

    def is_undone(self, chunk: int) -> bool:
        """Whether its last step was taken back, and the fragment not sent since."""
        return self._entries[chunk].undone

    def healed(self, chunk: int, cycle: int, stamp: Stamp) -> None:
        """The chunk is in the state of another peer, as it stood after `cycle`."""
        self._entries[chunk] = _ChunkEntry(stamp, cycle, over=self._entries[chunk].over)

    def sent(self) -> None:
        """Forget the states before the last steps (rule 3)."""
        for entry in self._entries:
            entry.before = entry.applied = None
            entry.undone = False


def _on_base(base: Stamp, ours: Stamp, outcome: ResultRank, same: ResultVerdict) -> ResultVerdict:
    """Judge a result on this base for a peer that is on `ours` (rules 1 and 4)."""
    if base == ours:
        return same
    if base.is_ahead_of(ours):
        return ResultVerdict.HEAL
    if ours.is_ahead_of(base):
        return ResultVerdict.IGNORE
    of_one_peer = outcome.weight <= MAX_CONTRIBUTION_WEIGHT
    return ResultVerdict.IGNORE if of_one_peer and ours.digest < base.digest else ResultVerdict.HEAL
