"""Which results are believed, and which states can be: what only one peer says moves nothing.

Anybody can sign anything. A result moves the outer copy of all, so it is taken only when what it
says of itself can be true by what we see ourselves.

Rules
  1. Its owner owns the chunk by our view, by one of the last few, or by one that differs from them
     in one member (owners.py): honest views differ by a peer that has just come
     or gone. What is refused here although the others took it is healed afterwards (healing.py).
  2. Its contributors are peers that we know: linked now, or of late. Each counts as much as any
     other (the message allows no other weight), so the largest weight is that of all whom we know.
  3. It is of a cycle near our own round; for any other we have no view to judge by.
  4. A state has at most one step for each cycle until then, and in each at most the weight of all
     contributors that there can be. More has no honest peer.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from protocol.limits import MAX_CONTRIBUTION_WEIGHT, MAX_CONTRIBUTORS
from protocol.outcomes import RefusalReason
from protocol.wire.fragment_messages import ChunkResult, Contribution, Result, Stamp

from .owners import may_own, owners_of_chunks
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
    return all(can_be(stamp, message.cycle) for stamp in message.stamps)


class Beliefs:
    """What one peer believes of results.

    Args:
        num_chunks: of each fragment.
    """

    def __init__(self, plan: SendPlan, peers: Peers, num_chunks: Sequence[int]) -> None:
        self._plan = plan
        self._peers = peers
        self._num_chunks = tuple(num_chunks)
        self._views: deque[frozenset[str]] = deque(maxlen=MAX_VIEWS)
        self._owners_in = lru_cache(MAX_KEPT)(owners_of_chunks)
        self._owned_near = lru_cache(MAX_KEPT)(may_own)

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
        """Rule 1; what nearly all who send results own is worked out first, and all once."""
        view = frozenset(self._peers.contributors(result.cycle))
        if view and view not in self._views:
            self._views.append(view)
        known, owner = self._peers.known, result.owner
        if owner not in known:
            return False
        key = self._plan.owners_key(result.fragment, result.cycle)
        about = key, self._num_chunks[result.fragment]
        if any(
            self._owners_in(*about, tuple(sorted(each)))[chunk] == owner for each in self._views
        ):
            return True
        return any(
            chunk in self._owned_near(*about, owner, each, known - each) for each in self._views
        )
