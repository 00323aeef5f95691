"""The addresses at which this machine itself can be reached: those of its network interfaces.

p2pd would tell others the address that a router gave us as well, as soon as enough of them have
seen it. It must not: nobody can dial that address unless a port is forwarded (which reaching.py
finds out), and a failed dial to it leaves a state in both routers that spoils the punching of a
hole for two minutes. So p2pd is told what to announce, and this is it.
"""

import ipaddress
import socket
from collections.abc import Sequence

import psutil

from peer.ports import Address
from protocol.address.multiaddr import join_parts, parse

_KINDS = {socket.AF_INET: "ip4", socket.AF_INET6: "ip6"}


def own_addresses(listen: Sequence[Address]) -> list[Address]:
    """Each address listened on, those of all interfaces in place of an unspecified one."""
    return [address for one in listen for address in _specified(one)]


def _specified(address: Address) -> list[Address]:
    (kind, host), *rest = parse(address)
    if not ipaddress.ip_address(host).is_unspecified:
        return [address]
    return [join_parts([(kind, own), *rest]) for own in _hosts(kind)]


def _hosts(kind: str) -> list[str]:
    """Addresses of all interfaces that are up, without those of this machine alone."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        each.address
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for each in addresses
        if name in up and _KINDS.get(each.family) == kind
    ]
    return [host for host in found if not _is_local(host)]


def _is_local(host: str) -> bool:
    ip = ipaddress.ip_address(host.partition("%")[0])
    return ip.is_loopback or ip.is_link_local
