"""Multiaddrs: where a peer can be reached, as text and as bytes.

An address is a chain of parts, each a protocol name with or without a value:
`/ip4/203.0.113.5/tcp/4001/p2p/12D3KooW...`. In bytes each part is the protocol's code (uvarint),
then its value: of fixed length for numbers, behind a uvarint length for names and peer ids
(multiformats/multiaddr, protocols.csv). Other parts than those listed here are refused by name,
never skipped. Every function here raises `InvalidAddress`.

A directory record holds the binary form, of what a peer can be dialled at, in canonical form alone.
The bound of an address is that of its text, in both forms: few bytes may be a long text.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from protocol.errors import LocoError, RemoteProtocolError
from protocol.limits import MAX_ADDRESS_CHARS

from .peer_id import peer_id_from_bytes, peer_id_to_bytes
from .varint import decode_uvarint, encode_uvarint

Address = str
PeerId = str

MAX_UNIX_PATH_BYTES: Final = 107
MAX_PORT: Final = 65535
_LABEL: Final = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
"""Labels of 1 to 63 characters (RFC 1035)."""


class InvalidAddress(LocoError): ...


@dataclass(frozen=True, slots=True)
class _Protocol:
    name: str
    code: int
    size: int | None
    """None where a length goes before the value, 0 where there is none."""
    to_bytes: Callable[[str], bytes]
    to_text: Callable[[bytes], str]


def _port_to_bytes(text: str) -> bytes:
    if not (text.isascii() and text.isdecimal()) or int(text) > MAX_PORT:
        raise InvalidAddress(f"{text!r} is not a port: use a number from 0 to {MAX_PORT}")
    return int(text).to_bytes(2, "big")


def _name_to_bytes(text: str) -> bytes:
    if not _HOST_NAME.fullmatch(text):
        raise InvalidAddress(f"{text!r} is not a host name")
    return text.encode("ascii")


def _name_to_text(data: bytes) -> str:
    return _name_to_bytes(data.decode("ascii")).decode()


def _path_to_bytes(text: str) -> bytes:
    data = text.encode()
    if not text.startswith("/") or len(data) > MAX_UNIX_PATH_BYTES:
        raise InvalidAddress(
            f"{text!r} is not an absolute path of at most {MAX_UNIX_PATH_BYTES} bytes"
        )
    return data


def _host_protocol(
    name: str, code: int, size: int, ip: type[IPv4Address | IPv6Address]
) -> _Protocol:
    return _Protocol(name, code, size, lambda text: ip(text).packed, lambda data: str(ip(data)))


def _port_to_text(data: bytes) -> str:
    return str(int.from_bytes(data, "big"))


_PROTOCOLS: Final = (
    _host_protocol("ip4", 4, 4, IPv4Address),
    _host_protocol("ip6", 41, 16, IPv6Address),
    _Protocol("tcp", 6, 2, _port_to_bytes, _port_to_text),
    _Protocol("udp", 273, 2, _port_to_bytes, _port_to_text),
    _Protocol("dns", 53, None, _name_to_bytes, _name_to_text),
    _Protocol("dns4", 54, None, _name_to_bytes, _name_to_text),
    _Protocol("dns6", 55, None, _name_to_bytes, _name_to_text),
    _Protocol("p2p", 421, None, peer_id_to_bytes, peer_id_from_bytes),
    _Protocol("unix", 400, None, _path_to_bytes, lambda data: data.decode()),
    _Protocol("quic-v1", 461, 0, lambda _: b"", lambda _: ""),
    _Protocol("p2p-circuit", 290, 0, lambda _: b"", lambda _: ""),
)
_BY_NAME: Final = {protocol.name: protocol for protocol in _PROTOCOLS}
_BY_CODE: Final = {protocol.code: protocol for protocol in _PROTOCOLS}
HOST_PROTOCOLS: Final = ("ip4", "ip6", "dns", "dns4", "dns6")


def parse(address: Address) -> list[tuple[str, str]]:
    """The parts of an address: (protocol name, value), the value empty where there is none."""
    if not address.startswith("/"):
        raise InvalidAddress(
            f"{address!r} is not a multiaddr: it must begin with '/', as in "
            "/ip4/203.0.113.5/tcp/4001"
        )
    parts = []
    words = iter(address[1:].removesuffix("/").split("/"))
    for name in words:
        protocol = _BY_NAME.get(name)
        if protocol is None:
            known = ", ".join(_BY_NAME)
            raise InvalidAddress(f"{address!r}: unknown part {name!r}; known are {known}")
        if name == "unix":
            value = "/" + "/".join(words)
        else:
            value = "" if protocol.size == 0 else next(words, "")
        if not value and protocol.size != 0:
            raise InvalidAddress(f"{address!r}: '/{name}' needs a value after it")
        parts.append((name, value))
    return parts


def to_bytes(address: Address) -> bytes:
    _check_length(address)
    return b"".join(_part_to_bytes(address, name, value) for name, value in parse(address))


def _check_length(address: Address) -> None:
    if len(address) > MAX_ADDRESS_CHARS:
        raise InvalidAddress(
            f"{address[:80]!r}... is longer than {MAX_ADDRESS_CHARS} characters; give a shorter one"
        )


def _part_to_bytes(address: Address, name: str, value: str) -> bytes:
    protocol = _BY_NAME[name]
    try:
        data = protocol.to_bytes(value)
    except (ValueError, LocoError) as error:
        raise InvalidAddress(f"{address!r}: {error}") from error
    length = encode_uvarint(len(data)) if protocol.size is None else b""
    return encode_uvarint(protocol.code) + length + data


def from_bytes(data: bytes) -> Address:
    if not data:
        raise InvalidAddress("an address of no bytes")
    text, offset = "", 0
    try:
        while offset < len(data):
            part, offset = _part_from_bytes(data, offset)
            text += part
            _check_length(text)
    except (ValueError, RemoteProtocolError) as error:
        raise InvalidAddress(f"not an address: {error} ({data.hex()})") from error
    return text


def _part_from_bytes(data: bytes, offset: int) -> tuple[str, int]:
    code, offset = decode_uvarint(data, offset)
    protocol = _BY_CODE.get(code)
    if protocol is None:
        raise ValueError(f"unknown protocol code {code}")
    size = protocol.size
    if size is None:
        size, offset = decode_uvarint(data, offset)
    value = data[offset : offset + size]
    if len(value) < size:
        raise ValueError(f"{protocol.name} is cut off")
    text = protocol.to_text(value)
    separator = "" if protocol.name == "unix" or not size else "/"
    return f"/{protocol.name}{separator}{text}", offset + size


def normalise(address: Address) -> Address:
    return from_bytes(to_bytes(address))


def readable(addresses: Iterable[Address]) -> tuple[Address, ...]:
    """The addresses of a stranger that can be read."""
    found = []
    for address in addresses:
        with suppress(InvalidAddress):
            to_bytes(address)
            found.append(address)
    return tuple(found)


def split_peer_id(address: Address) -> tuple[Address, PeerId | None]:
    """An address without its last `/p2p/` part, and the peer id in that part."""
    parts = parse(address)
    if parts[-1][0] != "p2p":
        return address, None
    return join_parts(parts[:-1]), parts[-1][1]


CIRCUIT: Final = "/p2p-circuit"


def is_relayed(address: Address) -> bool:
    """Whether an address leads through another peer."""
    return CIRCUIT in address


def relay_of(address: Address) -> PeerId | None:
    """The peer that a relayed address leads through last; None for any other address."""
    named = relay = None
    for name, value in parse(address) if is_relayed(address) else ():
        if name == "p2p":
            named = value
        elif name == "p2p-circuit":
            relay = named
    return relay


def with_peer_id(address: Address, peer_id: PeerId) -> Address:
    """The address with `/p2p/` and the peer id at its end, once."""
    bare, _ = split_peer_id(address)
    return f"{bare}/p2p/{peer_id}"


def join_parts(parts: Iterable[tuple[str, str]]) -> Address:
    return "".join(
        f"/{name}" + (value if name == "unix" else f"/{value}" if value else "")
        for name, value in parts
    )


def address_to_bytes(address: str) -> bytes:
    """The binary form of an address that a record may carry."""
    data = to_bytes(address)
    text = from_bytes(data)
    if text != address:
        raise InvalidAddress(f"{address!r} is not in canonical form: {text}")
    if any(name == "unix" for name, _ in parse(text)):
        raise InvalidAddress(f"{address!r} is an address of one machine alone")
    return data


def address_from_bytes(data: bytes) -> str:
    """The text of a record's binary address, which must be canonical."""
    text = from_bytes(data)
    if address_to_bytes(text) != data:
        raise InvalidAddress(f"{data.hex()} is not in canonical form")
    return text
