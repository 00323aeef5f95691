"""A budget of places: so many in all, so many for one identity, so many for one network.

What others can make us hold, send, compute or dial has such a budget beside the one for all, so
that one peer, or one customer of a provider with many identities, takes its share and no more.
Which network an address is in says protocol/address/prefix.py; addresses without one (private ones,
unknown ones) have the whole budget.

Invariant: what is kept grows with places taken, never with peers that were seen.
"""

from collections import Counter
from dataclasses import dataclass

from protocol.address.prefix import prefix_of


@dataclass(frozen=True, slots=True)
class Shares:
    """How a budget is divided: places in all, at most for one peer, at most for one network."""

    total: int
    per_peer: int
    per_prefix: int


class Budget:
    """Places, and those that hold them."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._by_peer: Counter[str] = Counter()
        self._by_prefix: Counter[str] = Counter()
        self._taken = 0

    @property
    def taken(self) -> int:
        """Places that are held."""
        return self._taken

    def held_by(self, peer_id: str) -> int:
        """Places that one peer holds."""
        return self._by_peer[peer_id]

    def has_room(self, peer_id: str, address: str) -> bool:
        """Whether this peer, which comes from this address, may have one more."""
        prefix = prefix_of(address)
        return (
            self._taken < self._shares.total
            and self._by_peer[peer_id] < self._shares.per_peer
            and (prefix is None or self._by_prefix[prefix] < self._shares.per_prefix)
        )

    def take(self, peer_id: str, address: str) -> None:
        """Hold one more place; ask `has_room` before."""
        self._taken += 1
        self._by_peer[peer_id] += 1
        prefix = prefix_of(address)
        if prefix is not None:
            self._by_prefix[prefix] += 1

    def give_back(self, peer_id: str, address: str) -> None:
        """Hold one less."""
        self._taken -= 1
        _one_less(self._by_peer, peer_id)
        prefix = prefix_of(address)
        if prefix is not None:
            _one_less(self._by_prefix, prefix)


def _one_less(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if counts[key] <= 0:
        del counts[key]
