"""Which network an address is in: those who hold one address there can have them all.

An identity costs nothing, an address something, a network more. So what one peer may cost us is
bounded for its identity and for its network: the /24 of an IPv4 address, the /48 of an IPv6
address, which is what one customer of a provider has. A relayed address counts as its relay, which
others cannot be told apart behind.

Addresses that are not of the open internet (this machine, a home, a data centre's inner network)
have no prefix: whoever is there already stands beside us, and people run many peers on one machine
and in one network of their own. Those share the whole budget.
"""

import ipaddress
from typing import Final

from .multiaddr import InvalidAddress, parse

IPV4_PREFIX_BITS: Final = 24
IPV6_PREFIX_BITS: Final = 48
MAX_PREFIX_CHARS: Final = 128


def prefix_of(address: str) -> str | None:
    """The network of a multiaddr; None where it is a private one, or cannot be told."""
    try:
        parts = parse(address)
    except InvalidAddress:
        return None
    if ("p2p-circuit", "") in parts:
        relay = [value for name, value in parts[: parts.index(("p2p-circuit", ""))] if value]
        return f"relay {relay[-1]}"[:MAX_PREFIX_CHARS] if relay else None
    kind, value = parts[0]
    return _network(value) if kind in ("ip4", "ip6") else None


def _network(text: str) -> str | None:
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if not ip.is_global:
        return None
    bits = IPV4_PREFIX_BITS if ip.version == 4 else IPV6_PREFIX_BITS
    return str(ipaddress.ip_network((ip, bits), strict=False))
