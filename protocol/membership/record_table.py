"""The records that one node of the directory keeps, and how many of whose.

Rules
  1. A record is taken from the peer alone that it is of, for the place that is in its signature.
     Nodes do not hand records on to each other: each peer stores its own at several, and again
     before it expires.
  2. The expiry is the one in the signature, at most MAX_RECORD_LIFETIME_S away. Of two records of
     one peer for one place the one that lasts longer is kept, in the place of the other.
  3. An identity costs nothing, an address something. So there are bounds for each peer, for the
     peers of each network, and for all: in the whole table, and at each place.

Invariant: what is kept is valid, lives, and is within the bounds, whatever comes.
"""

from dataclasses import dataclass
from typing import Final

from protocol.limits import MAX_RECORD_LIFETIME_S, RECORDS, RECORDS_OF_SHARD

from .book import Budget
from .records import PeerRecord, valid_record_at

SWEEP_EVERY_S: Final = 1.0


def live_record_at(now_s: float, place: bytes, peer_id: str, value: bytes) -> PeerRecord | None:
    """The record, None where it is not valid, or its expiry is not within bounds (rule 2)."""
    record = valid_record_at(place, peer_id, value)
    if record is None or not now_s < record.expires_s <= now_s + MAX_RECORD_LIFETIME_S:
        return None
    return record


@dataclass(slots=True)
class _KeptRecord:
    value: bytes
    expires_s: float
    address: str
    """The address that it came from when its place was taken."""


class _Shelf:
    """The records at one place."""

    def __init__(self) -> None:
        self.records: dict[str, _KeptRecord] = {}
        self.places = Budget(RECORDS_OF_SHARD)


class RecordTable:
    def __init__(self) -> None:
        self._shelves: dict[bytes, _Shelf] = {}
        self._places = Budget(RECORDS)
        self._swept_s = -SWEEP_EVERY_S

    def __len__(self) -> int:
        return self._places.taken

    def keep(self, now_s: float, place: bytes, peer_id: str, value: bytes, address: str) -> bool:
        """Keep a peer's record that came from this address. Returns whether it is kept now."""
        record = live_record_at(now_s, place, peer_id, value)
        if record is None:
            return False
        self._sweep(now_s)
        shelf = self._shelves.get(place, _Shelf())
        old = shelf.records.get(peer_id)
        if old is not None:
            if longer := record.expires_s > old.expires_s:
                old.value, old.expires_s = value, record.expires_s
            return longer
        budgets = (self._places, shelf.places)
        if not all(budget.has_room(peer_id, address) for budget in budgets):
            return False
        for budget in budgets:
            budget.take(peer_id, address)
        self._shelves[place] = shelf
        shelf.records[peer_id] = _KeptRecord(value, record.expires_s, address)
        return True

    def at(self, now_s: float, place: bytes) -> dict[str, bytes]:
        """The records at a place that have not expired: peer id to value."""
        shelf = self._shelves.get(place, _Shelf())
        return {peer: kept.value for peer, kept in shelf.records.items() if kept.expires_s > now_s}

    def _sweep(self, now_s: float) -> None:
        if 0 <= now_s - self._swept_s < SWEEP_EVERY_S:
            return
        self._swept_s = now_s
        for place, shelf in list(self._shelves.items()):
            for peer_id, kept in list(shelf.records.items()):
                if kept.expires_s <= now_s:
                    del shelf.records[peer_id]
                    for budget in (self._places, shelf.places):
                        budget.give_back(peer_id, kept.address)
            if not shelf.records:
                del self._shelves[place]
