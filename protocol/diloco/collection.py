"""The collection of an owner for its chunks of one fragment and cycle: what, and until when.

Rules
  1. A collection expects every peer that trains in the owner's view when it begins. It is complete
     when each of them has contributed, excused itself (weight 0: it is healing, or has nothing), or
     was lost; or when its deadline has passed. The average is of what is there.
  2. The chunks are those that contributors send us: where views differ, two owners may both have
     one, and the results are ordered (chunk_ledger.py, rule 2).
  3. A peer contributes once; what comes later or twice is not added.
  4. Contributions to a chunk may stand on different stamps: the way since *another* outer copy
     cannot be averaged with ours. The stamp on which most weight stands wins, whatever the owner's
     own is: a stamp that one peer claims to be ahead excludes nobody. Of as many the owner's own
     wins, then the one that is ahead (chunk_ledger.py, rule 1), then the lower digest. But one
     without any step, once there must be some, gives way to every other: it is that of joiners that
     have values and do not know of when. The others are left out, and see that from the result.
  5. Contributors are listed in the order of their peer ids: the sum has one order.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from protocol.fragment.chunk_ledger import Stamp
from protocol.limits import MAX_CONTRIBUTORS


@dataclass(frozen=True, slots=True)
class Admitted:
    """The peers that go into the average of one chunk.

    Attributes:
        base: the stamp that all of them stand on.
        weights: peer id to weight, in the order of the sum.
    """

    base: Stamp
    weights: Mapping[str, int]

    @property
    def weight(self) -> int:
        """The weight of all of them together."""
        return sum(self.weights.values())


@dataclass(frozen=True, slots=True)
class _Collected:
    weight: int
    stamps: Mapping[int, Stamp]


class Collection:
    """The contributions to an owner's chunks of one fragment and cycle.

    Args:
        expected: peer ids, our own among them.
        own_id: our own.
        begun: whether all states must have some steps by now.
    """

    def __init__(self, expected: Iterable[str], own_id: str = "", *, begun: bool = False) -> None:
        self._own_id, self._begun = own_id, begun
        self._awaited = set(expected)
        self._expected = len(self._awaited)
        self._contributions: dict[str, _Collected] = {}
        self.closed = False

    def add(self, peer_id: str, weight: int, stamps: Mapping[int, Stamp]) -> bool:
        """A contribution came. Returns whether it counts.

        Args:
            weight: 0 excuses.
            stamps: of each chunk that it is for: those that we own, as the contributor sees it.
        """
        if self.closed or peer_id in self._contributions:
            return False
        self._awaited.discard(peer_id)
        if weight == 0:
            return False
        self._contributions[peer_id] = _Collected(weight, dict(stamps))
        return True

    def excuse(self, peer_id: str) -> None:
        """Await a peer no longer: it is lost, or has left."""
        self._awaited.discard(peer_id)

    @property
    def is_full(self) -> bool:
        """Whether no further peer can be named in a result."""
        return len(self._contributions) >= MAX_CONTRIBUTORS

    @property
    def has_begun(self) -> bool:
        """Whether the owner itself has come to it, or more than half of the expected."""
        return self._own_id in self._contributions or 2 * len(self._contributions) > self._expected

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunks that some peer has contributed to."""
        chunks = {chunk for each in self._contributions.values() for chunk in each.stamps}
        return tuple(sorted(chunks))

    @property
    def is_complete(self) -> bool:
        """Whether nobody is awaited any more."""
        return not self._awaited

    @property
    def awaited(self) -> frozenset[str]:
        """The peers that have not come yet."""
        return frozenset(self._awaited)

    def admitted(self, chunk: int) -> Admitted | None:
        """The peers that go into the average of a chunk; None if there are none (rules 4 and 5)."""
        stamps = {
            peer_id: contribution.stamps[chunk]
            for peer_id, contribution in self._contributions.items()
            if chunk in contribution.stamps
        }
        if not stamps:
            return None
        stand_on: Counter[Stamp] = Counter()
        for peer_id, stamp in stamps.items():
            stand_on[stamp] += self._contributions[peer_id].weight
        own = stamps.get(self._own_id)

        def place(stamp: Stamp) -> tuple[bool, int, bool, int, int]:
            is_own = stamp == own
            tells = stamp.steps > 0 or not self._begun
            return tells, stand_on[stamp], is_own, stamp.steps, stamp.weight

        most = max(map(place, stand_on))
        tied = (stamp for stamp in stand_on if place(stamp) == most)
        base = min(tied, key=lambda stamp: stamp.digest)
        return Admitted(
            base,
            {
                peer_id: self._contributions[peer_id].weight
                for peer_id in sorted(stamps)
                if stamps[peer_id] == base
            },
        )
