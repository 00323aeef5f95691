"""Addresses as people type them: `host:port`, `[v6]:port`, a port alone, or a multiaddr."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Any, Final

MAX_PORT: Final = 65535
_HOST_NAME: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_PEER_ID: Final = re.compile(r"[1-9A-HJ-NP-Za-km-z]{20,128}")
_NEEDS_PORT: Final = (
    "give a host and the port that the peer listens on, as HOST:PORT or a multiaddr"
)
_HOST_PROTOCOLS: Final = ("ip4", "ip6", "dns", "dns4", "dns6")


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
        return _from_multiaddr(text)[0]
    host, colon, port = text.rpartition(":")
    if not colon:
        host = "0.0.0.0"
    elif host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"write an IPv6 address in brackets, as [{host}]:{port}")
    return HostPort(_host(host), _port(port))


def _host(text: str) -> str:
    if _host_protocol(text) == "dns" and not _HOST_NAME.fullmatch(text):
        raise ValueError("use HOST:PORT or a multiaddr such as /ip4/203.0.113.5/tcp/31337")
    return text


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise ValueError(f"the port must be a number from 0 to {MAX_PORT}")
    return int(text)


def _from_multiaddr(text: str) -> tuple[HostPort, str | None]:
    parts = text.split("/")[1:]
    if len(parts) < 4 or parts[0] not in _HOST_PROTOCOLS or parts[2] != "tcp":
        raise ValueError("use a multiaddr such as /ip4/203.0.113.5/tcp/31337")
    host, port, rest = _host(parts[1]), _port(parts[3]), parts[4:]
    if parts[0] in ("ip4", "ip6") and _host_protocol(host) != parts[0]:
        raise ValueError(f"'{host}' is not an {parts[0]} address")
    if not rest:
        return HostPort(host, port), None
    if len(rest) != 2 or rest[0] != "p2p" or not _PEER_ID.fullmatch(rest[1]):
        raise ValueError("after /tcp/PORT only /p2p/PEER_ID may follow")
    return HostPort(host, port), rest[1]


def parse_bootstrap(text: str) -> str:
    """Check an address to join by: `HOST:PORT`, or a multiaddr with or without `/p2p/PEER_ID`.

    Returns it unchanged. A relayed address (`/p2p-circuit`) passes as it is.

    Raises:
        ValueError
    """
    text = text.strip()
    if "/p2p-circuit" in text and text.startswith("/"):
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
