"""The owner's part: what is collected, until when, and what is refused.

There is one `Collection` for each fragment and cycle that somebody has sent us something for. It is
averaged when it is complete, or at its deadline, which follows how long such collections took.

Rules
  1. A peer that let a deadline pass is not waited for again before it has contributed: a peer that
     stalls costs the others one deadline, however long it stalls. When what was missed comes later,
     the deadline learns how long it would have had to be: so it follows links that become slower.
     Until it has learnt, it uses how long the others took where somebody was waited for in vain.
     The time of a later cycle does not run before we have come to its round, or more than half of
     those that are expected have contributed: a peer that is ahead cannot close it for the others.
  2. A contribution is refused that comes twice, or for a cycle that is over, or for one that is
     more than one ahead of any that others have come to: it would close the cycles between for all.
     One beyond MAX_CONTRIBUTORS is refused as `too_many`: no result could name its sender.
  3. At most MAX_COLLECTIONS are open, and as many are being averaged. Of open ones the oldest is
     closed as it is; what averaging cannot keep up with is lost.
  4. Every collection is told to be over once: at once when nothing came for it or it is lost, else
     when its average is there.

Rules of one collection
  5. It expects every peer that trains in the owner's view when it begins. It is complete when each
     of them has contributed, excused itself (weight 0: it is healing, or has nothing), or was lost.
  6. The chunks are those that contributors send us: where views differ, two owners may both have
     one, and the results are ordered (chunk_ledger.py, rule 2).
  7. A peer contributes once.
  8. Contributions to a chunk may stand on different stamps, but the way since *another* outer copy
     cannot be averaged with ours. The stamp on which most weight stands wins, whatever the owner's
     own is: a stamp that one peer claims to be ahead excludes nobody. Among equals the owner's own
     wins, then the one that is ahead (chunk_ledger.py, rule 1), then the lower digest. But a stamp
     without any step, once there must be some, gives way to every other: it is that of joiners that
     have values and do not know of when. The others are left out, and see that from the result.
  9. Contributors are listed in the order of their peer ids: the sum has one order.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Final

from protocol.limits import MAX_CONTRIBUTORS
from protocol.outcomes import RefusalReason
from protocol.schedule.deadline import ObservedDeadline
from protocol.wire.fragment_messages import Contribution, Stamp

from .commands import Admitted, Average, Codes
from .peers import BEGUN_FROM, Context

MIN_COLLECT_S: Final = 1.0
MAX_COLLECT_S: Final = 30.0
MAX_COLLECTIONS: Final = 16
"""Collected at once, and averaged at once (rule 3)."""

Key = tuple[int, int]
"""Fragment and cycle."""


class Collection:
    """The contributions to an owner's chunks of one fragment and cycle.

    Args:
        begun: whether all states must have some steps by now.

    Attributes:
        codes: by chunk and contributor.
        messages: what came with them.
    """

    def __init__(
        self, expected: Iterable[str], own_id: str = "", *, begun: bool = False, began_s: float = 0
    ) -> None:
        self._own_id, self._begun = own_id, begun
        self._awaited = set(expected)
        self._expected = len(self._awaited)
        self._contributions: dict[str, Mapping[int, Stamp]] = {}
        self.began_s = self.last_came_s = began_s
        self.deadline_s = math.inf
        self.codes = defaultdict[int, dict[str, memoryview]](dict)
        self.messages: dict[str, Contribution] = {}

    def add(self, peer_id: str, stamps: Mapping[int, Stamp]) -> bool:
        """Take a contribution to these chunks; False if it is not the peer's first."""
        if peer_id in self._contributions:
            return False
        self._awaited.discard(peer_id)
        self._contributions[peer_id] = stamps
        return True

    def excuse(self, peer_id: str) -> None:
        """Await a peer no longer: it is lost, or has left."""
        self._awaited.discard(peer_id)

    @property
    def is_full(self) -> bool:
        return len(self._contributions) >= MAX_CONTRIBUTORS

    @property
    def has_others(self) -> bool:
        return any(peer_id != self._own_id for peer_id in self._contributions)

    @property
    def has_begun(self) -> bool:
        return self._own_id in self._contributions or 2 * len(self._contributions) > self._expected

    @property
    def chunks(self) -> tuple[int, ...]:
        return tuple(sorted({chunk for each in self._contributions.values() for chunk in each}))

    @property
    def is_complete(self) -> bool:
        return not self._awaited

    @property
    def awaited(self) -> frozenset[str]:
        return frozenset(self._awaited)

    def admitted(self, chunk: int) -> Admitted:
        """The peers that go into the average of one of these chunks (rules 8 and 9)."""
        stamps = {
            peer_id: of_chunks[chunk]
            for peer_id, of_chunks in self._contributions.items()
            if chunk in of_chunks
        }
        votes, own = Counter(stamps.values()), stamps.get(self._own_id)

        def place(stamp: Stamp) -> tuple[bool, int, bool, int, int, bytes]:
            tells_nothing = self._begun and not stamp.steps
            history = (-stamp.steps, -stamp.weight, stamp.digest)
            return (tells_nothing, -votes[stamp], stamp != own, *history)

        base = min(votes, key=place)
        return Admitted(base, tuple(sorted(p for p, stamp in stamps.items() if stamp == base)))


class Owner:
    """The collections of one peer; `over` are those of which the core is yet to tell (rule 4)."""

    def __init__(self, context: Context) -> None:
        self.over: deque[Key] = deque()
        self._context = context
        self._peers = context.peers
        self._open: dict[Key, Collection] = {}
        self._newest = [-1] * context.plan.num_fragments
        self._cut_short_of: dict[int, tuple[int, float]] = {}
        self._patience = ObservedDeadline(floor_s=MIN_COLLECT_S, ceiling_s=MAX_COLLECT_S)
        self._others_s = math.inf
        self._num_averaging = 0

    @property
    def next_deadline_s(self) -> float | None:
        due_s = min((each.deadline_s for each in self._open.values()), default=math.inf)
        return None if due_s == math.inf else due_s

    def advance(self) -> None:
        for key, collecting in list(self._open.items()):
            self._start_clock(key)
            for peer_id in collecting.awaited - self._peers.expected(*key):
                collecting.excuse(peer_id)
            is_late = self._context.now_s >= collecting.deadline_s
            if collecting.is_complete or is_late:
                self._close(key)

    def contributed(
        self, peer_id: str, contribution: Contribution, codes: Codes
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
        if contribution.weight and collecting.is_full:
            return RefusalReason.TOO_MANY
        if not contribution.weight:
            collecting.excuse(peer_id)
        elif collecting.add(peer_id, {stamp.chunk: stamp for stamp in contribution.stamps}):
            collecting.messages[peer_id] = contribution
            for chunk, part in codes.items():
                collecting.codes[chunk][peer_id] = part
        else:
            return RefusalReason.TWICE
        collecting.last_came_s = self._context.now_s
        self._start_clock(key)
        if collecting.is_complete:
            self._close(key)
        return None

    def averaged(self, fragment: int, cycle: int) -> None:
        """An average is there, or will never be."""
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
        """This is what the last collection lacked, if it was cut short (rule 1)."""
        missed = self._cut_short_of.get(fragment)
        if missed is not None and missed[0] == cycle:
            del self._cut_short_of[fragment]
            self._patience.observe(self._context.now_s - missed[1])

    def _begin(self, key: Key) -> None:
        if len(self._open) >= MAX_COLLECTIONS:
            self._close(min(self._open, key=lambda each: self._open[each].began_s))
        expected = self._peers.expected(*key) - self._peers.late
        begun, now_s = key[1] >= BEGUN_FROM, self._context.now_s
        own_id = self._peers.own_id
        self._open[key] = Collection(expected, own_id, begun=begun, began_s=now_s)
        self._start_clock(key)

    def _start_clock(self, key: Key) -> None:
        """From now on a collection's time runs, if it may (rule 1)."""
        collecting = self._open[key]
        may_run = collecting.has_begun or key[1] <= self._peers.seen.round
        if may_run and collecting.deadline_s == math.inf:
            patience_s = self._patience.bound_s(self._others_s)
            patience_s *= self._context.plan.sends_at_once(key[1])
            collecting.deadline_s = self._context.now_s + patience_s

    def _close(self, key: Key) -> None:
        collecting = self._open.pop(key)
        fragment, cycle = key
        self._newest[fragment] = max(self._newest[fragment], cycle)
        if collecting.is_complete:
            self._patience.observe(collecting.last_came_s - collecting.began_s)
        else:
            self._peers.late |= collecting.awaited
            self._cut_short_of[fragment] = (cycle, collecting.began_s)
            if collecting.has_others:
                self._others_s = collecting.last_came_s - collecting.began_s
        chunks, is_busy = collecting.chunks, self._num_averaging >= MAX_COLLECTIONS
        if not chunks or is_busy:
            self.over.append(key)
            return
        self._num_averaging += 1
        admitted = {chunk: collecting.admitted(chunk) for chunk in chunks}
        self._context.do(Average(fragment, cycle, admitted, collecting.codes, collecting.messages))
