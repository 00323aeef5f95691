"""Which of a peer's addresses are worth what: to others, and on this machine."""

import ipaddress
from collections.abc import Iterable, Sequence

from peer.ports import Address
from protocol.address.multiaddr import HOST_PROTOCOLS, InvalidAddress, from_bytes, parse


def best_first(addresses: Iterable[Address]) -> list[Address]:
    """Each address once, those that most peers can reach first.

    Public, relayed, private, link-local, loopback.
    """
    return sorted(dict.fromkeys(addresses), key=_distance)


def is_loopback(address: Address) -> bool:
    """Whether only this machine can dial the address."""
    return _distance(address) >= _LOOPBACK


_PUBLIC, _RELAYED, _PRIVATE, _LINK_LOCAL, _LOOPBACK, _UNUSABLE = range(6)


def _distance(address: Address) -> int:
    try:
        parts = parse(address)
        kind, value = parts[0]
        if ("p2p-circuit", "") in parts:
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
    return _PRIVATE if ip.is_private else _PUBLIC


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
