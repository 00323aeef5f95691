"""The nodes of the directory that one of them knows, and its searches through the others.

A node is a peer. It stands at the hash of its peer id (records.py), and two places are as far apart
as their exclusive or says (Maymounkov and Mazieres, Kademlia, IPTPS 2002). A record is kept by the
REPLICAS nodes nearest to its place that the peer it is of has found.

Rules
  1. A peer is a node from its first question or answer on, until it does not answer. Then it rests
     (book.py, rule 5), so that names of nobody are not dialled with each search.
  2. All nodes are known, within bounds: one for each peer, a share for each network. When there is
     no more room newcomers are left out, not those that have answered for long. So there are no
     buckets, and a search mostly knows beforehand whom it will end at.
  3. A search asks the BEAM nearest nodes that it has heard of, and nearer ones that they name,
     until all of the BEAM nearest have answered. One that is silent gives way to the next nearest.
  4. Others can name nodes without end. So no more than BEAM are asked at once, and a search ends
     after MOST_ASKED or SEARCH_S; what it has found then counts.

Invariant: what is known grows within the bounds alone, whatever others name.
"""

from collections.abc import Iterable
from dataclasses import replace
from heapq import nsmallest
from typing import Final

from protocol.limits import NEAREST_NODES, RECORDS

from .book import REDIALS, BackOff, Budget
from .records import place_of

REPLICAS: Final = 5
BEAM: Final = 2 * REPLICAS
"""Some of the nearest have not heard of a record, and some are silent."""
MOST_ASKED: Final = 64
"""Three times what a search among a thousand nodes takes (tests/protocol/test_node_table.py)."""
SEARCH_S: Final = 4.0


def position_of(place: bytes) -> int:
    return int.from_bytes(place, "big")


def position_of_node(peer_id: str) -> int:
    return position_of(place_of(peer_id.encode()))


class NodeTable:
    """The nodes that a peer knows, except itself."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._places = Budget(replace(RECORDS, per_peer=1))
        self._nodes: dict[str, tuple[int, str]] = {}
        self._rests = BackOff(*REDIALS)

    def __len__(self) -> int:
        return len(self._nodes)

    def asked(self, peer_id: str, address: str) -> None:
        """A peer has asked us something, from this address."""
        known = peer_id in self._nodes or peer_id == self._own_id
        if not known and self._places.has_room(peer_id, address):
            self._places.take(peer_id, address)
            self._nodes[peer_id] = position_of_node(peer_id), address

    def answered(self, peer_id: str, address: str) -> None:
        self._rests.answered(peer_id)
        self.asked(peer_id, address)

    def silent(self, peer_id: str, now_s: float) -> None:
        self._rests.failed(peer_id, now_s)
        if peer_id in self._nodes:
            self._places.give_back(peer_id, self._nodes.pop(peer_id)[1])

    def may_ask(self, peer_id: str, now_s: float) -> bool:
        return peer_id != self._own_id and self._rests.is_due(peer_id, now_s)

    def nearest(self, place: bytes, but: str = "") -> list[str]:
        """The nodes that an answer names, the nearest first; never the one that has asked."""
        position, others = position_of(place), (name for name in self._nodes if name != but)
        return nsmallest(NEAREST_NODES, others, lambda name: self._nodes[name][0] ^ position)


class NodeSearch:
    """One search for the nodes that are nearest to a place (rule 3)."""

    def __init__(self, nodes: NodeTable, place: bytes) -> None:
        self._nodes = nodes
        self._position = position_of(place)
        self._distances: dict[str, int] = {}
        self._asked: set[str] = set()
        self._waiting: set[str] = set()
        self._answered: set[str] = set()

    def hear(self, names: Iterable[str], now_s: float) -> None:
        """Somebody names these nodes."""
        for name in names:
            if name not in self._asked and self._nodes.may_ask(name, now_s):
                self._distances[name] = position_of_node(name) ^ self._position

    def next_asked(self) -> list[str]:
        """The nodes to ask now; each is told once."""
        beam = nsmallest(BEAM, self._distances, self._distances.__getitem__)
        room = min(BEAM - len(self._waiting), MOST_ASKED - len(self._asked))
        new = [name for name in beam if name not in self._asked][:room]
        self._asked.update(new)
        self._waiting.update(new)
        return new

    def answered(self, name: str) -> None:
        self._waiting.remove(name)
        self._answered.add(name)

    def silent(self, name: str) -> None:
        self._waiting.remove(name)
        del self._distances[name]

    def keepers(self) -> list[str]:
        """The nodes at which to keep a record, of those that have answered."""
        return nsmallest(REPLICAS, self._answered, self._distances.__getitem__)
