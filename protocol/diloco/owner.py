"""The owner's part: what is collected, until when, and what is refused.

One `Collection` per fragment and cycle that somebody has sent us something for. It is averaged when
it is complete, or when its deadline has passed; the deadline follows what such collections took
before. Which contributions go into an average is decided in collection.py.

Rules
  1. A peer that let a deadline pass is not waited for again before it has contributed: a peer that
     stalls costs the others one deadline, however long it stalls. When what was missed comes later,
     the deadline learns how long it would have had to be: so it follows links that become slower.
     Of a cycle to come no time runs before we have come to its round, or more than half of those
     that are expected have contributed: a peer that is ahead cannot close it for all the others.
  2. A contribution is refused that comes twice, or for a cycle that is over, or for one that is
     more than one ahead of any that others have come to: it would close the cycles between for all.
     One beyond MAX_CONTRIBUTORS is refused as `too_many`: no result could name its sender.
  3. At most MAX_COLLECTIONS are open, and at most as many are being averaged. Of open ones the
     oldest is closed as it is; what averaging cannot keep up with is lost, and counted.
  4. Every collection is told to be over once: at once when nothing came for it or it is lost, else
     when its average is there.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from protocol.outcomes import RefusalReason
from protocol.schedule.deadline import ObservedDeadline
from protocol.wire.fragment_messages import Contribution

from .collection import Admitted, Collection
from .commands import Average, Parts
from .peers import BEGUN_FROM, Context

MIN_COLLECT_S: Final = 1.0
MAX_COLLECT_S: Final = 30.0
MAX_COLLECTIONS: Final = 16
"""Collected at once, and averaged at once (rule 3)."""

Key = tuple[int, int]
"""Fragment and cycle."""


@dataclass(slots=True)
class _Open:
    """One collection under way."""

    collection: Collection
    deadline_s: float
    began_s: float
    last_came_s: float
    codes: dict[int, dict[str, memoryview]] = field(default_factory=dict)
    contributions: dict[str, Contribution] = field(default_factory=dict)

    def admitted(self) -> dict[int, Admitted]:
        """The peers that go into the average of each chunk."""
        by_chunk = ((chunk, self.collection.admitted(chunk)) for chunk in self.collection.chunks)
        return {chunk: admitted for chunk, admitted in by_chunk if admitted is not None}


class Owner:
    """All collections of one peer. See the top of the file.

    Attributes:
        over: what is over, until the core has told it (rule 4).
    """

    def __init__(self, context: Context) -> None:
        self.over: deque[Key] = deque()
        self._context = context
        self._peers = context.peers
        self._open: dict[Key, _Open] = {}
        self._newest = [-1] * context.plan.num_fragments
        self._cut_short_of: dict[int, tuple[int, float]] = {}
        self._patience = ObservedDeadline(floor_s=MIN_COLLECT_S, ceiling_s=MAX_COLLECT_S)
        self._num_averaging = 0

    @property
    def next_deadline_s(self) -> float | None:
        """When the next collection's time is up; None while none runs."""
        due_s = min((each.deadline_s for each in self._open.values()), default=math.inf)
        return None if due_s == math.inf else due_s

    def look(self) -> None:
        """See who is not expected any more, and whose time is up."""
        for key, collecting in list(self._open.items()):
            self._start_clock(key)
            for peer_id in collecting.collection.awaited - self._peers.expected(*key):
                collecting.collection.excuse(peer_id)
            is_late = self._context.now_s >= collecting.deadline_s
            if collecting.collection.is_complete or is_late:
                self._close(key)

    def contributed(
        self, peer_id: str, contribution: Contribution, codes: Parts
    ) -> RefusalReason | None:
        """Take codes of chunks that a peer, perhaps we, sent us; or say why not."""
        key = (contribution.fragment, contribution.cycle)
        if contribution.cycle >= self._newest[contribution.fragment]:
            self._peers.late.discard(peer_id)
        if key not in self._open:
            if reason := self._reason_to_refuse(*key, peer_id):
                self._learn_from_late(*key)
                return reason
            self._begin(key)
        collecting = self._open[key]
        if contribution.weight and collecting.collection.is_full:
            return RefusalReason.TOO_MANY
        stamps = {stamp.chunk: stamp.stamp for stamp in contribution.stamps}
        if collecting.collection.add(peer_id, contribution.weight, stamps):
            collecting.contributions[peer_id] = contribution
            for chunk, part in codes.items():
                collecting.codes.setdefault(chunk, {})[peer_id] = part
        elif contribution.weight:
            return RefusalReason.TWICE
        collecting.last_came_s = self._context.now_s
        self._start_clock(key)
        if collecting.collection.is_complete:
            self._close(key)
        return None

    def averaged(self, fragment: int, cycle: int) -> None:
        """Note that an average is there, or will never be."""
        self._num_averaging -= 1
        self.over.append((fragment, cycle))

    def _reason_to_refuse(self, fragment: int, cycle: int, peer_id: str) -> RefusalReason | None:
        """Why nothing is collected for a cycle, if so (rule 2)."""
        newest = max(self._newest[fragment], self._peers.reached(fragment, peer_id))
        if cycle <= self._newest[fragment]:
            return RefusalReason.AHEAD
        if cycle > newest + 1:
            return RefusalReason.BEHIND
        if not self._peers.expected(fragment, cycle):  # of another time: it can help nobody
            return RefusalReason.AHEAD if cycle <= newest else RefusalReason.BEHIND
        return None

    def _learn_from_late(self, fragment: int, cycle: int) -> None:
        """The last collection was cut short, and this is what it lacked (rule 1)."""
        missed = self._cut_short_of.get(fragment)
        if missed is not None and missed[0] == cycle:
            del self._cut_short_of[fragment]
            self._patience.observe(self._context.now_s - missed[1])

    def _begin(self, key: Key) -> None:
        if len(self._open) >= MAX_COLLECTIONS:
            self._close(min(self._open, key=lambda each: self._open[each].began_s))
        expected = self._peers.expected(*key) - self._peers.late
        begun, now_s = key[1] >= BEGUN_FROM, self._context.now_s
        collection = Collection(expected, self._peers.own_id, begun=begun)
        self._open[key] = _Open(collection, math.inf, now_s, now_s)
        self._start_clock(key)

    def _start_clock(self, key: Key) -> None:
        """From now on a collection's time runs, if it may (rule 1)."""
        collecting = self._open[key]
        may_run = collecting.collection.has_begun or key[1] <= self._peers.seen.round
        if may_run and collecting.deadline_s == math.inf:
            patience_s = self._patience.current_s * self._context.plan.sends_at_once(key[1])
            collecting.deadline_s = self._context.now_s + patience_s

    def _close(self, key: Key) -> None:
        collecting, counts = self._open.pop(key), self._context.counts
        fragment, cycle = key
        self._newest[fragment] = max(self._newest[fragment], cycle)
        if collecting.collection.is_complete:
            self._patience.observe(collecting.last_came_s - collecting.began_s)
            counts.complete += 1
        else:
            self._peers.late |= collecting.collection.awaited
            self._cut_short_of[fragment] = (cycle, collecting.began_s)
            counts.cut_short += 1
        collecting.collection.closed = True
        chunks, is_busy = collecting.collection.chunks, self._num_averaging >= MAX_COLLECTIONS
        if not chunks or is_busy:
            counts.cut_short += bool(chunks)
            self.over.append(key)
            return
        self._num_averaging += 1
        admitted = collecting.admitted()
        self._context.do(
            Average(fragment, cycle, admitted, collecting.codes, collecting.contributions)
        )
