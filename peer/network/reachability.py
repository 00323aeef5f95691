"""The reach of addresses, and the addresses of this machine's network interfaces.

p2pd would tell others the address that a router gave us, as soon as enough of them have seen it. It
must not: nobody can dial that address unless a port is forwarded (which outside.py finds out), and
a failed dial to it leaves a state in both routers that spoils the punching of a hole for two
minutes. So p2pd is told to announce the addresses of our interfaces.

Bridges that containers and virtual machines hang on are left out: nobody outside this machine can
dial them, and elsewhere the same address is another machine's own bridge. One through which the
default route goes is this machine's way out, and stays. The address of that route comes first.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import psutil

from peer.runtime import Address
from protocol.address.multiaddr import (
    HOST_PROTOCOLS,
    InvalidAddress,
    from_bytes,
    is_relayed,
    join_parts,
    parse,
    split_peer_id,
)


class Scope(StrEnum):
    """From where an address can be dialled."""

    ANYWHERE = "anywhere"
    NETWORK = "this network"
    MACHINE = "this machine"


def best_first(addresses: Iterable[Address], given: Sequence[Address] = ()) -> list[Address]:
    """Each address once: the given ones, then public, relayed, private, link-local, loopback."""
    return list(dict.fromkeys([*given, *sorted(addresses, key=_distance)]))


def is_loopback(address: Address) -> bool:
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
        given, working: without peer id, as the user has named them, and where others got through.
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
    """Binary addresses that we can read, as text; p2pd may learn of other kinds."""
    return [text for text in map(text_of, addresses) if text]


def text_of(address: bytes) -> Address:
    """The text of a binary address; empty where we cannot read it."""
    try:
        return from_bytes(address)
    except InvalidAddress:
        return ""


def local_form(address: Address) -> Address:
    """The address under which this machine itself reaches a listening address."""
    return address.replace("/ip4/0.0.0.0/", "/ip4/127.0.0.1/").replace("/ip6/::/", "/ip6/::1/")


def num_relayed(connections: Iterable[tuple[bytes, Sequence[bytes]]]) -> int:
    """How many peers have no direct connection, by each connection's peer and addresses."""
    connections = list(connections)
    direct = {peer for peer, at in connections if not all(map(is_relayed, understood(at)))}
    return len({peer for peer, _ in connections} - direct)


FAMILIES: Final = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}
_ELSEWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation: nobody has them, so the default route leads there."""
_INTERFACES: Final = Path("/sys/class/net")
_BRIDGE_NAMES: Final = re.compile(
    r"(docker|podman|cni|virbr|lxcbr|lxdbr|vmnet|flannel|nerdctl|bridge)\d|(br-|veth|cali|cilium_)"
)
"""Names that makers of bridges give, to what stands beside a bridge too."""


def own_addresses(listen: Sequence[Address]) -> list[Address]:
    """Each address listened on, those of all interfaces in place of an unspecified one."""
    return [address for one in listen for address in _specified(one)]


def _specified(address: Address) -> list[Address]:
    (kind, host), *rest = parse(address)
    if not ipaddress.ip_address(host).is_unspecified:
        return [address]
    hosts = reachable_hosts(_interface_addresses(FAMILIES[kind]), _way_out(FAMILIES[kind]))
    return [join_parts([(kind, own), *rest]) for own in hosts]


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """An address of an interface that is up; a bridge joins others inside this machine."""

    interface: str
    host: str
    is_bridge: bool = False


def reachable_hosts(addresses: Iterable[InterfaceAddress], way_out: str | None) -> list[str]:
    """The addresses at which others may reach this machine, that of the default route first.

    Args:
        way_out: that of the default route; None where there is no such route.
    """
    named = [each for each in addresses if not _is_local(each.host)]
    leading = {each.interface for each in named if each.host == way_out}
    usable = [each for each in named if not each.is_bridge or each.interface in leading]
    usable.sort(key=lambda each: (each.host != way_out, each.interface not in leading))
    return [each.host for each in usable]


def _interface_addresses(family: socket.AddressFamily) -> list[InterfaceAddress]:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return [
        InterfaceAddress(name, each.address, is_bridge(name))
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for each in addresses
        if name in up and each.family == family
    ]


def is_bridge(interface: str, folder: Path = _INTERFACES) -> bool:
    return (folder / interface / "bridge").is_dir() or bool(_BRIDGE_NAMES.match(interface))


def _way_out(family: socket.AddressFamily) -> str | None:
    """Our address on the default route. Nothing is sent: the kernel looks the route up."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE[family], 9))
        except OSError:
            return None
        host: str = probe.getsockname()[0]
        return host


def _is_local(host: str) -> bool:
    ip = ipaddress.ip_address(host.partition("%")[0])
    return ip.is_loopback or ip.is_link_local
