"""Which results are believed, and which states can be: what only one peer says moves nothing.

Anybody can sign anything. A result moves the outer copy of all, so it is taken only when what it
says of itself can be true by what we see ourselves.

Rules
  1. Its owner owns the chunk by our view, by one of the last few, or by one that differs from them
     in one member (protocol/fragment/owners.py): honest views differ by a peer that has just come
     or gone. What is refused here although the others took it is healed afterwards (healing.py).
  2. Its contributors are peers that we know: linked now, or of late. Each counts as much as any
     other (the message allows no other weight), so the largest weight is that of all whom we know.
  3. It is of a cycle near our own round; for any other we have no view to judge by.
  4. A state has at most one step for each cycle until then, and in each at most the weight of all
     contributors that there can be. More has no honest peer.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

from protocol.fragment.chunk_ledger import Stamp
from protocol.fragment.owners import may_own, owners_of_chunks
from protocol.limits import MAX_CONTRIBUTION_WEIGHT, MAX_CONTRIBUTORS
from protocol.outcomes import RefusalReason
from protocol.wire.fragment_messages import ChunkResult, Contribution, Result

from .peers import Peers, SendPlan

MAX_VIEWS: Final = 3
"""Views of late that owners may have been chosen by."""
MAX_KEPT: Final = 512
"""Answers to who may own what, kept until they are needed no more."""


def can_be(stamp: Stamp, cycle: int) -> bool:
    """Whether a state after this cycle (-1 before the first) can have such a stamp (rule 4)."""
    most = MAX_CONTRIBUTORS * MAX_CONTRIBUTION_WEIGHT
    return stamp.steps <= cycle + 1 and stamp.weight <= stamp.steps * most


def can_stand(message: Contribution) -> bool:
    """Whether a contribution stands on states that there can be (a healed one is of its cycle)."""
    return all(can_be(stamp.stamp, message.cycle) for stamp in message.stamps)


class Beliefs:
    """What one peer believes of results. See the top of the file.

    Args:
        num_chunks: of each fragment.
    """

    def __init__(self, plan: SendPlan, peers: Peers, num_chunks: Sequence[int]) -> None:
        self._plan = plan
        self._peers = peers
        self._num_chunks = tuple(num_chunks)
        self._views: deque[frozenset[str]] = deque(maxlen=MAX_VIEWS)
        self._owned: OrderedDict[tuple[int, int, str, frozenset[str]], frozenset[int]]
        self._owned = OrderedDict()
        self._owners: OrderedDict[tuple[int, int, frozenset[str]], tuple[str, ...]]
        self._owners = OrderedDict()

    def is_of_our_time(self, cycle: int) -> bool:
        """Whether we have a view to judge by (rule 3)."""
        return bool(self._peers.contributors(cycle))

    def doubt(self, result: Result, chunk: ChunkResult) -> RefusalReason | None:
        """Why a result for a chunk, of our time, is not believed; None if it is."""
        if not self._peers.known.issuperset(result.contributors_of(chunk)):
            return RefusalReason.NOT_LINKED
        if not can_be(chunk.base_stamp, result.cycle):
            return RefusalReason.IMPLAUSIBLE
        if result.owner == self._peers.own_id or self._may_own(result, chunk.chunk):
            return None
        return RefusalReason.NOT_OWNER

    def _may_own(self, result: Result, chunk: int) -> bool:
        """Rule 1."""
        self._note_view(result.cycle)
        if result.owner not in self._peers.known:
            return False
        if any(self._owners_in(result, view)[chunk] == result.owner for view in self._views):
            return True
        return any(chunk in self._owned_near(result, view) for view in self._views)

    def _note_view(self, cycle: int) -> None:
        view = frozenset(self._peers.contributors(cycle))
        if view and view not in self._views:
            self._views.append(view)

    def _owners_in(self, result: Result, view: frozenset[str]) -> tuple[str, ...]:
        """The owners by this very view, as nearly all who send results are; worked out once."""
        asked = (result.fragment, result.cycle, view)
        if asked not in self._owners:
            key = self._plan.owners_key(result.fragment, result.cycle)
            num_chunks = self._num_chunks[result.fragment]
            self._owners[asked] = owners_of_chunks(key, num_chunks, sorted(view))
            while len(self._owners) > MAX_KEPT:
                self._owners.popitem(last=False)
        return self._owners[asked]

    def _owned_near(self, result: Result, view: frozenset[str]) -> frozenset[int]:
        """The chunks that a result's owner owns by views near to this one; worked out once."""
        asked = (result.fragment, result.cycle, result.owner, view)
        if asked not in self._owned:
            key = self._plan.owners_key(result.fragment, result.cycle)
            unseen = self._peers.known - view
            num_chunks = self._num_chunks[result.fragment]
            self._owned[asked] = may_own(key, num_chunks, result.owner, view, unseen)
            while len(self._owned) > MAX_KEPT:
                self._owned.popitem(last=False)
        return self._owned[asked]
