"""Peers that are reached through another one: how an address shows it, and how many there are."""

from collections.abc import Iterable

from peer.ports import Address

from .p2pd_messages import PeerAddresses
from .reachability import understood

CIRCUIT = "/p2p-circuit"


def is_relayed(address: Address) -> bool:
    """Whether an address leads through another peer."""
    return CIRCUIT in address


def num_relayed(connections: Iterable[PeerAddresses]) -> int:
    """How many of the peers that p2pd is connected to have no direct connection."""
    direct: dict[bytes, bool] = {}
    for connection in connections:
        relayed = all(is_relayed(address) for address in understood(connection.addresses))
        direct[connection.peer] = direct.get(connection.peer, False) or not relayed
    return sum(not each for each in direct.values())
