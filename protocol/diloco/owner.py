"""The owner's part: what is collected, until when, and what is refused.

One `Collection` per fragment and cycle that somebody has sent us something for. It is averaged when
it is complete, or when its deadline has passed; the deadline follows what such collections took
before. Which contributions go into an average is decided in protocol/fragment/collection.py.

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
  4. Every collection ends in one `PartOver`: at once when nothing came for it or it is lost, else
     when its average is there.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from protocol.fragment.collection import Admitted, Collection
from protocol.outcomes import RefusalReason
from protocol.schedule.deadline import ObservedDeadline
from protocol.wire.fragment_messages import Contribution

from .fragment_events import Average, ContributionRefused, PartOver, Parts
from .peers import BEGUN_FROM, Peers, SendPlan

MIN_COLLECT_S: Final = 1.0
MAX_COLLECT_S: Final = 30.0
MAX_COLLECTIONS: Final = 16
"""Collected at once, and averaged at once (rule 3)."""

Key = tuple[int, int]
"""Fragment and cycle."""
OwnerOutput = Average | PartOver | ContributionRefused


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


@dataclass(frozen=True, slots=True)
class OwnerStatistics:
    """Counts since the start."""

    complete: int
    cut_short: int


class Owner:
    """All collections of one peer. See the top of the file."""

    def __init__(self, plan: SendPlan, peers: Peers) -> None:
        self._plan = plan
        self._peers = peers
        self._open: dict[Key, _Open] = {}
        self._newest = [-1] * plan.num_fragments
        self._late: set[str] = set()
        self._cut_short_of: dict[int, tuple[int, float]] = {}
        self._patience = ObservedDeadline(floor_s=MIN_COLLECT_S, ceiling_s=MAX_COLLECT_S)
        self._num_averaging = 0
        self._complete = self._cut_short = 0

    @property
    def next_deadline_s(self) -> float | None:
        """When the next collection's time is up; None while none runs."""
        due_s = min((each.deadline_s for each in self._open.values()), default=math.inf)
        return None if due_s == math.inf else due_s

    @property
    def late(self) -> frozenset[str]:
        """The peers that let a deadline pass, and have not contributed since (rule 1)."""
        return frozenset(self._late)

    def statistics(self) -> OwnerStatistics:
        """Counts since the start."""
        return OwnerStatistics(self._complete, self._cut_short)

    def forget_absent(self) -> None:
        """Forget every peer that is not there: should it come again, it is a newcomer."""
        self._late &= self._peers.present

    def look(self, now_s: float) -> Iterator[OwnerOutput]:
        """See who is not expected any more, and whose time is up."""
        for key, collecting in list(self._open.items()):
            self._start_clock(now_s, key)
            for peer_id in collecting.collection.awaited - self._peers.expected(*key):
                collecting.collection.excuse(peer_id)
            if collecting.collection.is_complete or now_s >= collecting.deadline_s:
                yield from self._close(key)

    def contributed(
        self, now_s: float, peer_id: str, contribution: Contribution, codes: Parts
    ) -> Iterator[OwnerOutput]:
        """Take codes of chunks that a peer, perhaps we, sent us."""
        key = (contribution.fragment, contribution.cycle)
        if contribution.cycle >= self._newest[contribution.fragment]:
            self._late.discard(peer_id)
        if key not in self._open and (reason := self._reason_to_refuse(*key, peer_id)):
            self._learn_from_late(now_s, *key)
            yield ContributionRefused(peer_id, contribution, reason)
            return
        if key not in self._open:
            yield from self._begin(now_s, key)
        collecting = self._open[key]
        if contribution.weight and collecting.collection.is_full:
            yield ContributionRefused(peer_id, contribution, RefusalReason.TOO_MANY)
            return
        stamps = {stamp.chunk: stamp.stamp for stamp in contribution.stamps}
        if collecting.collection.add(peer_id, contribution.weight, stamps):
            collecting.contributions[peer_id] = contribution
            for chunk, part in codes.items():
                collecting.codes.setdefault(chunk, {})[peer_id] = part
        elif contribution.weight:
            yield ContributionRefused(peer_id, contribution, RefusalReason.TWICE)
            return
        collecting.last_came_s = now_s
        self._start_clock(now_s, key)
        if collecting.collection.is_complete:
            yield from self._close(key)

    def averaged(self, fragment: int, cycle: int) -> Iterable[OwnerOutput]:
        """Note that an average is there, or will never be."""
        self._num_averaging -= 1
        return (PartOver(fragment, cycle),)

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

    def _learn_from_late(self, now_s: float, fragment: int, cycle: int) -> None:
        """The last collection was cut short, and this is what it lacked (rule 1)."""
        missed = self._cut_short_of.get(fragment)
        if missed is not None and missed[0] == cycle:
            del self._cut_short_of[fragment]
            self._patience.observe(now_s - missed[1])

    def _begin(self, now_s: float, key: Key) -> Iterator[OwnerOutput]:
        if len(self._open) >= MAX_COLLECTIONS:
            yield from self._close(min(self._open, key=lambda each: self._open[each].began_s))
        expected = self._peers.expected(*key) - self._late
        begun = key[1] >= BEGUN_FROM
        collection = Collection(expected, self._peers.own_id, begun=begun)
        self._open[key] = _Open(collection, math.inf, now_s, now_s)
        self._start_clock(now_s, key)

    def _start_clock(self, now_s: float, key: Key) -> None:
        """From now on a collection's time runs, if it may (rule 1)."""
        collecting = self._open[key]
        may_run = collecting.collection.has_begun or key[1] <= self._peers.own_round
        if may_run and collecting.deadline_s == math.inf:
            patience_s = self._patience.current_s * self._plan.sends_at_once(key[1])
            collecting.deadline_s = now_s + patience_s

    def _close(self, key: Key) -> Iterator[OwnerOutput]:
        collecting = self._open.pop(key)
        fragment, cycle = key
        self._newest[fragment] = max(self._newest[fragment], cycle)
        if collecting.collection.is_complete:
            self._patience.observe(collecting.last_came_s - collecting.began_s)
            self._complete += 1
        else:
            self._late |= collecting.collection.awaited
            self._cut_short_of[fragment] = (cycle, collecting.began_s)
            self._cut_short += 1
        collecting.collection.closed = True
        if not collecting.collection.chunks:
            yield PartOver(*key)
        elif self._num_averaging >= MAX_COLLECTIONS:
            self._cut_short += 1
            yield PartOver(*key)
        else:
            self._num_averaging += 1
            yield Average(
                fragment,
                cycle,
                collecting.admitted(),
                collecting.codes,
                collecting.contributions,
            )
