"""The addresses at which this machine itself can be reached: those of its network interfaces.

p2pd would tell others the address that a router gave us as well, as soon as enough of them have
seen it. It must not: nobody can dial that address unless a port is forwarded (which reaching.py
finds out), and a failed dial to it leaves a state in both routers that spoils the punching of a
hole for two minutes. So p2pd is told what to announce, and this is it.

Bridges that containers and virtual machines hang on are left out: nobody outside this machine can
dial them, and elsewhere the same address is another machine's own bridge. One through which the
default route goes is this machine's way out, and stays. The address of that route comes first.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from peer.ports import Address
from protocol.address.multiaddr import join_parts, parse

_FAMILIES: Final = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}
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
    hosts = reachable_hosts(_interface_addresses(_FAMILIES[kind]), _way_out(_FAMILIES[kind]))
    return [join_parts([(kind, own), *rest]) for own in hosts]


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """An address of an interface that is up.

    Attributes:
        is_bridge: whether the interface joins others inside this machine.
    """

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
    """The addresses of all interfaces that are up, by name."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return [
        InterfaceAddress(name, each.address, is_bridge(name))
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for each in addresses
        if name in up and each.family == family
    ]


def is_bridge(interface: str, folder: Path = _INTERFACES) -> bool:
    """Whether an interface joins others inside this machine, as its kind or its name says."""
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
