"""Addresses as people type them: `host:port`, `[v6]:port`, a port alone, or a multiaddr."""

import ipaddress
from dataclasses import dataclass
from typing import Any, Final

from protocol.address import multiaddr
from protocol.address.multiaddr import HOST_PROTOCOLS, MAX_PORT, InvalidAddress

_NEEDS_PORT: Final = (
    "give a host and the port that the peer listens on, as HOST:PORT or a multiaddr"
)


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host (name or IP address, v6 without brackets) and a TCP port; port 0 picks a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def multiaddr(self) -> str:
        """`/ip4/...`, `/ip6/...` or `/dns/...`, then `/tcp/port`."""
        return f"/{_host_protocol(self.host)}/{self.host}/tcp/{self.port}"


def _host_protocol(host: str) -> str:
    try:
        return f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        return "dns"


def parse_host_port(value: Any) -> HostPort:
    """Read `HOST:PORT`, `[V6]:PORT`, `PORT`, or `/ip4/HOST/tcp/PORT`.

    A port alone means every IPv4 interface.

    Raises:
        ValueError: says what would be right.
    """
    text = str(value).strip()
    if text.startswith("/"):
        return _from_multiaddr(text)
    scheme, is_url, rest = text.partition("://")
    if is_url:
        bare = rest.partition("/")[0]
        raise ValueError(f"write HOST:PORT without {scheme}://, as {bare or 'HOST:PORT'}")
    host, colon, port = text.rpartition(":")
    if not colon:
        host = "0.0.0.0"
    elif host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"write an IPv6 address in brackets, as [{host}]:{port}")
    where = HostPort(host, _port(port))
    try:
        multiaddr.to_bytes(where.multiaddr())
    except InvalidAddress as error:
        raise ValueError(
            "use HOST:PORT or a multiaddr such as /ip4/203.0.113.5/tcp/31337"
        ) from error
    return where


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise ValueError(f"the port must be a number from 0 to {MAX_PORT}")
    return int(text)


def _parts(text: str) -> list[tuple[str, str]]:
    try:
        return multiaddr.parse(multiaddr.normalise(text))
    except InvalidAddress as error:
        raise ValueError(str(error)) from error


def _from_multiaddr(text: str) -> HostPort:
    parts = _parts(text)
    names = [name for name, _ in parts]
    if len(names) < 2 or names[0] not in HOST_PROTOCOLS or names[1] != "tcp":
        raise ValueError("use a multiaddr such as /ip4/203.0.113.5/tcp/31337")
    if names[2:] not in ([], ["p2p"]):
        raise ValueError("after /tcp/PORT only /p2p/PEER_ID may follow")
    return HostPort(parts[0][1], int(parts[1][1]))


def parse_bootstrap(text: str) -> str:
    """Check an address to join by: `HOST:PORT`, or a multiaddr with or without `/p2p/PEER_ID`.

    Returns it unchanged. A relayed address (`/p2p-circuit`) names the relay and the peer.

    Raises:
        ValueError
    """
    text = text.strip()
    if text.startswith("/") and ("p2p-circuit", "") in (parts := _parts(text)):
        if parts[-1][0] != "p2p":
            raise ValueError("after /p2p-circuit the peer must follow, as /p2p/PEER_ID")
        return text
    if ":" not in text and not text.startswith("/"):
        raise ValueError(_NEEDS_PORT)
    if parse_host_port(text).port == 0:
        raise ValueError(_NEEDS_PORT)
    return text


def parse_announce(text: str) -> str:
    """Check an address to tell others: `HOST:PORT` or a multiaddr.

    Returns a multiaddr without a peer id.

    Raises:
        ValueError: port 0 and an unspecified host are refused: nobody could dial them.
    """
    where = parse_host_port(text)
    if where.port == 0:
        raise ValueError("port 0 cannot be announced: nobody can dial it")
    if where.host in ("0.0.0.0", "::"):
        raise ValueError(
            f"{where.host} cannot be announced: give the address that others reach you by"
        )
    return where.multiaddr()
