"""Which snapshot is proposed, by whom, and when: no coordinator, and seldom.

Rules
  1. Of the data peers that train, the one with the lowest peer id proposes. It gathers the link
     vectors of all peers of the pipeline; the others take the snapshot that it names. Where views
     differ two may propose for a while: each data peer follows the one that it sees, and plans
     differ until views agree. Nothing depends on plans being equal.
  2. A snapshot is proposed when the vectors have changed: at once when peers have come or gone, at
     most every REPLAN_EVERY_S when numbers have (measures.py says when those change).
  3. Of a peer's vectors the newest counts. A peer that is gone is left out of the next snapshot, as
     is one that says another stage than its beats do; one that has told nothing yet is not waited
     for.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from protocol.errors import LocalProtocolError

from .snapshots import LinkSnapshot
from .vectors import LinkVector

REPLAN_EVERY_S: Final = 20.0


def proposer_of(data_peers: Iterable[str]) -> str | None:
    """The data peer that proposes; None where there is none."""
    return min(data_peers, default=None)


class Proposals:
    """What a data peer has gathered. See the top of the file."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._vectors: dict[str, LinkVector] = {}
        self._signed: dict[str, bytes] = {}
        self._proposed_s: float | None = None

    def take(self, vector: LinkVector, signed: bytes) -> bool:
        """A vector has come. Returns whether it is newer than what was there."""
        known = self._vectors.get(vector.peer_id)
        if known is not None and known.version >= vector.version:
            return False
        self._vectors[vector.peer_id], self._signed[vector.peer_id] = vector, signed
        return True

    def keep(self, stages: Mapping[str, int]) -> None:
        """Forget the vectors of all but these peers, and of those that say another stage."""
        for peer_id, vector in list(self._vectors.items()):
            if stages.get(peer_id) != vector.stage:
                del self._vectors[peer_id], self._signed[peer_id]

    def due(self, current: LinkSnapshot | None, now_s: float) -> LinkSnapshot | None:
        """The snapshot to propose now; None when the current one stands, or they are too many."""
        try:
            proposed = LinkSnapshot.of(self._run_id, self._signed, self._vectors.values())
        except LocalProtocolError:
            return None
        if current is not None and _places(proposed) == _places(current):
            since_s = math.inf if self._proposed_s is None else now_s - self._proposed_s
            if proposed.digest == current.digest or since_s < REPLAN_EVERY_S:
                return None
        self._proposed_s = now_s
        return proposed


def _places(snapshot: LinkSnapshot) -> list[tuple[str, int]]:
    return [(vector.peer_id, vector.stage) for vector in snapshot.vectors]
