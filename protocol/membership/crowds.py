"""Which connections to close, where strangers hold more of them than anybody needs.

A connection costs its opener nothing and us memory, and whoever reaches our port may open one. One
is *used* while a stream of ours goes over it. That has passed the gate, where streams are counted
for each identity and network. What is not used is bounded here:

  1. Beyond MAX_IDLE_CONNECTIONS of them, each network (book.py) keeps as many as any other. So one
     that comes in crowds keeps nobody else out.
  2. None is closed at the first look that finds it idle: a newcomer needs a moment to say hello.
  3. A peer with more than MAX_CONNECTIONS_PER_PEER, used or not, loses all of them.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from protocol.address.multiaddr import InvalidAddress, parse
from protocol.limits import MAX_CONNECTIONS_PER_PEER, MAX_IDLE_CONNECTIONS

from .book import prefix_of

Connections = Sequence[tuple[bytes, str]]
"""Peer and address of each that is open."""


def idle_peers(connections: Connections, used: Collection[bytes]) -> dict[bytes, str]:
    """The peers with idle connections, with an address of each."""
    return {peer: address for peer, address in connections if peer not in used}


def to_close(
    connections: Connections, used: Collection[bytes], idle_before: Collection[bytes]
) -> list[bytes]:
    """The peers whose connections should be closed.

    Args:
        used: peers with an open stream of ours.
        idle_before: those that the last look found idle.
    """
    held = Counter(peer for peer, _ in connections)
    hoarders = [peer for peer, number in held.items() if number > MAX_CONNECTIONS_PER_PEER]
    idle = idle_peers(connections, used)
    places: Counter[str] = Counter()
    place = {}
    for peer, address in idle.items():
        network = _network_of(address)
        places[network] += 1
        place[peer] = places[network]
    surplus = sorted(idle, key=place.__getitem__)[MAX_IDLE_CONNECTIONS:]
    return [*hoarders, *(peer for peer in surplus if peer in idle_before and peer not in hoarders)]


def _network_of(address: str) -> str:
    """The network of an address; of a private one, its host."""
    try:
        return prefix_of(address) or parse(address)[0][1]
    except InvalidAddress:
        return ""
