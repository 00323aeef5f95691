"""Addresses in as few bytes as a directory record needs: the binary form of multiaddrs.

Each part is its code in the multiaddr table (uvarint), then its value: numbers at fixed length,
names and peer ids with a one-byte length before them (their bounds keep the uvarint of the
standard at one byte). Only what a peer can be dialled at is understood; everything else is
refused.
"""

import ipaddress
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from .errors import RemoteProtocolError
from .peer_id import peer_id_from_bytes, peer_id_to_bytes

MAX_COMPACT_ADDRESS_BYTES: Final = 120
MAX_HOST_NAME_CHARS: Final = 112
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9.])?")


def _port_to_bytes(text: str) -> bytes:
    if not re.fullmatch(r"0|[1-9][0-9]{0,4}", text) or int(text) > 0xFFFF:
        raise ValueError(f"{text!r} is not a port")
    return int(text).to_bytes(2, "big")


def _name_to_bytes(text: str) -> bytes:
    if len(text) > MAX_HOST_NAME_CHARS or not _HOST_NAME.fullmatch(text):
        raise ValueError(f"{text!r} is not a host name of at most {MAX_HOST_NAME_CHARS} characters")
    return text.encode("ascii")


def _name_to_text(data: bytes) -> str:
    text = data.decode("ascii")
    _name_to_bytes(text)
    return text


class _Part(NamedTuple):
    """How one part is written; `size` is None where a length precedes the value."""

    name: str
    code: bytes
    size: int | None
    to_bytes: Callable[[str], bytes]
    to_text: Callable[[bytes], str]


_PARTS: Final = (
    _Part(
        "ip4",
        b"\x04",
        4,
        lambda text: ipaddress.IPv4Address(text).packed,
        lambda data: str(ipaddress.IPv4Address(data)),
    ),
    _Part(
        "ip6",
        b"\x29",
        16,
        lambda text: ipaddress.IPv6Address(text).packed,
        lambda data: str(ipaddress.IPv6Address(data)),
    ),
    _Part("tcp", b"\x06", 2, _port_to_bytes, lambda data: str(int.from_bytes(data, "big"))),
    _Part("udp", b"\x91\x02", 2, _port_to_bytes, lambda data: str(int.from_bytes(data, "big"))),
    _Part("dns", b"\x35", None, _name_to_bytes, _name_to_text),
    _Part("dns4", b"\x36", None, _name_to_bytes, _name_to_text),
    _Part("dns6", b"\x37", None, _name_to_bytes, _name_to_text),
    _Part("p2p", b"\xa5\x03", None, peer_id_to_bytes, peer_id_from_bytes),
    _Part("quic-v1", b"\xcd\x03", 0, lambda _: b"", lambda _: ""),
    _Part("p2p-circuit", b"\xa2\x02", 0, lambda _: b"", lambda _: ""),
)
_BY_NAME: Final = {part.name: part for part in _PARTS}


def address_to_bytes(address: str) -> bytes:
    """The binary form of a multiaddr's text.

    Raises:
        ValueError: not an address that a record can carry; the message says why.
    """
    if not address.startswith("/"):
        raise ValueError(f"{address!r} is not a multiaddr")
    encoded, words = b"", iter(address[1:].split("/"))
    for name in words:
        part = _BY_NAME.get(name)
        if part is None:
            raise ValueError(f"{address!r}: unknown part {name!r}")
        encoded += part.code + _value_to_bytes(part, "" if part.size == 0 else next(words, ""))
    if len(encoded) > MAX_COMPACT_ADDRESS_BYTES:
        raise ValueError(f"{address!r} needs more than {MAX_COMPACT_ADDRESS_BYTES} bytes")
    return encoded


def _value_to_bytes(part: _Part, text: str) -> bytes:
    try:
        value = part.to_bytes(text)
    except RemoteProtocolError as error:
        raise ValueError(str(error)) from error
    return bytes([len(value)]) + value if part.size is None else value


def address_from_bytes(data: bytes) -> str:
    """The text of a binary address.

    Raises:
        ValueError: not the canonical bytes of an address; the message says why.
    """
    if not 0 < len(data) <= MAX_COMPACT_ADDRESS_BYTES:
        raise ValueError(f"an address of {len(data)} bytes")
    text, rest = "", data
    while rest:
        part_text, rest = _part_from_bytes(rest)
        text += part_text
    if address_to_bytes(text) != data:
        raise ValueError(f"{data.hex()} is not in canonical form")
    return text


def _part_from_bytes(data: bytes) -> tuple[str, bytes]:
    part = next((part for part in _PARTS if data.startswith(part.code)), None)
    if part is None:
        raise ValueError(f"unknown protocol code at {data[:4].hex()}")
    rest = data[len(part.code) :]
    size = part.size
    if size is None:
        size, rest = (rest[0] if rest else 1), rest[1:]
    if len(rest) < size:
        raise ValueError(f"{part.name} is cut off")
    try:
        value = part.to_text(rest[:size])
    except RemoteProtocolError as error:
        raise ValueError(str(error)) from error
    return f"/{part.name}" + (f"/{value}" if part.size != 0 else ""), rest[size:]
