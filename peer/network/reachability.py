"""Which of a peer's addresses are worth what: to others, and on this machine."""

import ipaddress
from collections.abc import Iterable, Sequence
from enum import StrEnum

from peer.ports import Address
from protocol.address.multiaddr import (
    HOST_PROTOCOLS,
    InvalidAddress,
    from_bytes,
    is_relayed,
    parse,
    split_peer_id,
)


class Scope(StrEnum):
    """From where an address can be dialled."""

    ANYWHERE = "anywhere"
    NETWORK = "this network"
    MACHINE = "this machine"


def best_first(addresses: Iterable[Address], given: Sequence[Address] = ()) -> list[Address]:
    """Each address once, those that most peers can reach first; but first those that are given.

    Public, relayed, private, link-local, loopback.
    """
    return list(dict.fromkeys([*given, *sorted(addresses, key=_distance)]))


def is_loopback(address: Address) -> bool:
    """Whether only this machine can dial the address."""
    return _distance(address) >= _LOOPBACK


def is_usable(address: Address) -> bool:
    """Whether anybody can dial the address: not one that is unspecified, or cannot be read."""
    return _distance(address) != _UNUSABLE


def scope_of(address: Address) -> Scope:
    """From where the address can be dialled; of a relayed one, where the relay can."""
    distance = _distance(address.partition("/p2p/")[0])
    if distance >= _LOOPBACK:
        return Scope.MACHINE
    return Scope.ANYWHERE if distance == _PUBLIC else Scope.NETWORK


def address_to_join(
    addresses: Sequence[Address],
    *,
    given: Iterable[Address] = (),
    working: Iterable[Address] = (),
    needs_relay: bool = False,
) -> Address:
    """The one of our addresses that others are shown to join by.

    What the user has named goes first, then where others got through, then what `best_first` says;
    what only this machine can dial goes last, whoever else of it got through there.

    Args:
        addresses: ours, each with our peer id; at least one.
        given: without peer id, as the user has named them.
        working: the same, where others got through.
        needs_relay: others have tried our own addresses, and did not get through.
    """
    named, reached = frozenset(given), frozenset(working)

    def rank(address: Address) -> tuple[bool, bool, bool, bool, int]:
        bare = split_peer_id(address)[0]
        distance = _distance(address)
        direct = needs_relay and distance != _RELAYED
        local = distance >= _LOOPBACK
        return bare not in named, local, bare not in reached, direct, distance

    return min(addresses, key=rank)


_PUBLIC, _RELAYED, _PRIVATE, _LINK_LOCAL, _LOOPBACK, _UNUSABLE = range(6)


def _distance(address: Address) -> int:
    try:
        kind, value = parse(address)[0]
        if is_relayed(address):
            return _RELAYED
        if kind in ("ip4", "ip6"):
            return _ip_distance(ipaddress.ip_address(value))
    except (InvalidAddress, ValueError):
        return _UNUSABLE
    if kind == "unix" or value == "localhost":
        return _LOOPBACK
    return _PUBLIC if kind in HOST_PROTOCOLS else _UNUSABLE


def _ip_distance(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> int:
    if ip.is_unspecified:
        return _UNUSABLE
    if ip.is_loopback:
        return _LOOPBACK
    if ip.is_link_local:
        return _LINK_LOCAL
    return _PUBLIC if ip.is_global else _PRIVATE


def understood(addresses: Sequence[bytes]) -> list[Address]:
    """The text of those binary addresses that we can read; p2pd may learn of other kinds."""
    texts = []
    for address in addresses:
        try:
            texts.append(from_bytes(address))
        except InvalidAddress:
            continue
    return texts


def text_of(address: bytes) -> Address:
    """The text of a binary address; empty where we cannot read it."""
    return next(iter(understood([address])), "")


def local_form(address: Address) -> Address:
    """The address under which this machine itself reaches a listening address."""
    return address.replace("/ip4/0.0.0.0/", "/ip4/127.0.0.1/").replace("/ip6/::/", "/ip6/::1/")


def num_relayed(connections: Iterable[tuple[bytes, Sequence[bytes]]]) -> int:
    """How many peers have no direct connection, by each connection's peer and addresses."""
    direct: dict[bytes, bool] = {}
    for peer, addresses in connections:
        relayed = all(map(is_relayed, understood(addresses)))
        direct[peer] = direct.get(peer, False) or not relayed
    return sum(not each for each in direct.values())
