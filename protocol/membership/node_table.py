"""The nodes of the directory that one of them knows, and its searches through the others.

A node is a peer. It stands at the hash of its peer id (records.py), and two places are as far apart
as their exclusive or says (Maymounkov and Mazieres, Kademlia, IPTPS 2002). A record is kept by the
REPLICAS nodes nearest to its place that the peer it is of has found.

Rules
  1. A peer is a node from its first question or answer on, until it does not answer. Then it rests
     (book.py, rule 5), so that names of nobody are not dialled with each search.
  2. All nodes are known, within bounds: one for each peer, a share for each network. So there are
     no buckets, and a search mostly knows beforehand whom it will end at. When there is no more
     room newcomers are left out; the node whose last answer is the oldest is asked then, if that
     is CHECKED_AFTER_S ago, and leaves if it is silent. So the dead make place, and a flood of
     newcomers drives out nobody that answers.
  3. A node that has answered us is proven, until it is silent. A question costs nothing, so who
     has only asked us may be one of a thousand names of nobody. An answer names proven nodes first.
  4. A search asks the BEAM nearest nodes that it has heard of, and nearer ones that they name,
     until all of the BEAM nearest have answered. One that is silent gives way to the next nearest.
     The nearest proven nodes, up to half a beam, are asked before these: however near names of
     nobody are, they hold up the other half alone. A peer that we enter by counts as proven.
  5. Others can name nodes without end. So no more than BEAM are asked at once, and a search ends
     after MOST_ASKED or SEARCH_S; what it has found then counts. Those that were asked
     SILENT_AFTER_S before the end have been silent: else the last ones would never rest.

Invariant: what is known grows within the bounds alone, whatever others name.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import chain
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
SILENT_AFTER_S: Final = 1.5
"""Two round trips of a slow line (600 ms), and some."""
CHECKED_AFTER_S: Final = 600.0


def position_of(place: bytes) -> int:
    return int.from_bytes(place, "big")


def position_of_node(peer_id: str) -> int:
    return position_of(place_of(peer_id.encode()))


@dataclass(frozen=True, slots=True)
class _Node:
    position: int
    address: str
    heard_s: float
    """When it came, or last answered."""
    proven: bool = False


class NodeTable:
    """The nodes that a peer knows, except itself."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._places = Budget(replace(RECORDS, per_peer=1))
        self._nodes: dict[str, _Node] = {}
        """Those whose last answer is the oldest come first."""
        self._rests = BackOff(*REDIALS)

    def __len__(self) -> int:
        return len(self._nodes)

    def asked(self, peer_id: str, address: str, now_s: float) -> bool:
        """A peer has asked us something, from this address. Returns whether it had room."""
        if peer_id in self._nodes or peer_id == self._own_id:
            return True
        if not self._places.has_room(peer_id, address):
            return False
        self._places.take(peer_id, address)
        self._nodes[peer_id] = _Node(position_of_node(peer_id), address, now_s)
        return True

    def answered(self, peer_id: str, address: str, now_s: float) -> None:
        self._rests.answered(peer_id)
        self.asked(peer_id, address, now_s)
        if (node := self._nodes.pop(peer_id, None)) is not None:
            self._nodes[peer_id] = replace(node, heard_s=now_s, proven=True)

    def silent(self, peer_id: str, now_s: float) -> None:
        self._rests.failed(peer_id, now_s)
        if peer_id in self._nodes:
            self._places.give_back(peer_id, self._nodes.pop(peer_id).address)

    def may_ask(self, peer_id: str, now_s: float) -> bool:
        return peer_id != self._own_id and self._rests.is_due(peer_id, now_s)

    def is_proven(self, peer_id: str) -> bool:
        return peer_id in self._nodes and self._nodes[peer_id].proven

    def has_proven(self) -> bool:
        return any(node.proven for node in self._nodes.values())

    def to_check(self, now_s: float) -> str | None:
        """The node to ask where a newcomer found no room (rule 2)."""
        oldest = next(iter(self._nodes), None)
        if oldest is None or now_s - self._nodes[oldest].heard_s < CHECKED_AFTER_S:
            return None
        return oldest

    def told(self, place: bytes, but: str) -> list[str]:
        """The nodes that an answer names, proven ones first; never the one that has asked."""
        position, nodes = position_of(place), self._nodes

        def rank(name: str) -> tuple[bool, int]:
            return not nodes[name].proven, nodes[name].position ^ position

        return nsmallest(NEAREST_NODES, (name for name in nodes if name != but), rank)

    def near(self, place: bytes, now_s: float) -> list[str]:
        """The nodes that a search begins with: the nearest, and the nearest that are proven."""
        position, nodes = position_of(place), self._nodes
        due = [name for name in nodes if self.may_ask(name, now_s)]
        groups = due, filter(self.is_proven, due)
        nearest = (
            nsmallest(NEAREST_NODES, group, lambda name: nodes[name].position ^ position)
            for group in groups
        )
        return list(dict.fromkeys(chain.from_iterable(nearest)))


class NodeSearch:
    """One search for the nodes that are nearest to a place (rules 4 and 5).

    Args:
        first: the peers that we enter by, which count as proven.
    """

    def __init__(self, nodes: NodeTable, place: bytes, first: Iterable[str] = ()) -> None:
        self._nodes = nodes
        self._first = frozenset(first)
        self._position = position_of(place)
        self._distances: dict[str, int] = {}
        self._asked: set[str] = set()
        self._waiting: dict[str, float] = {}
        self._answered: set[str] = set()

    def hear(self, names: Iterable[str], now_s: float) -> None:
        """Somebody names these nodes."""
        for name in names:
            if name not in self._asked and self._nodes.may_ask(name, now_s):
                self._distances[name] = position_of_node(name) ^ self._position

    def next_asked(self, now_s: float) -> list[str]:
        """The nodes to ask now; each is told once."""
        nearest = self._distances.__getitem__
        proven = nsmallest(BEAM // 2, filter(self._is_proven, self._distances), nearest)
        wanted = dict.fromkeys([*proven, *nsmallest(BEAM, self._distances, nearest)])
        room = min(BEAM - len(self._waiting), MOST_ASKED - len(self._asked))
        new = [name for name in wanted if name not in self._asked][:room]
        self._asked.update(new)
        self._waiting.update(dict.fromkeys(new, now_s))
        return new

    def _is_proven(self, name: str) -> bool:
        return name in self._first or self._nodes.is_proven(name)

    def answered(self, name: str) -> None:
        del self._waiting[name]
        self._answered.add(name)

    def silent(self, name: str) -> None:
        del self._waiting[name]
        del self._distances[name]

    def end(self, now_s: float) -> None:
        """No answer is waited for any longer."""
        for name, asked_s in self._waiting.items():
            if now_s - asked_s >= SILENT_AFTER_S:
                self._nodes.silent(name, now_s)

    def keepers(self) -> list[str]:
        """The nodes at which to keep a record, of those that have answered."""
        return nsmallest(REPLICAS, self._answered, self._distances.__getitem__)
