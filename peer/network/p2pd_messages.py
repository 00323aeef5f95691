"""The messages of p2pd's control socket, without any IO.

p2pd (go-libp2p-daemon, as shipped inside the hivemind wheel) takes a protobuf `Request` behind a
uvarint length on its unix socket and answers with a `Response`. After a successful STREAM_OPEN the
same connection *is* the libp2p stream. For a stream from outside, p2pd connects to our listener and
writes a `StreamInfo` first.

Six small messages are used, of two field kinds: varints and length-delimited bytes. They are
written and read here directly rather than through hivemind's generated module: that one registers
itself in the process-wide protobuf pool and cannot be had without importing hivemind, which is the
directory's affair alone. A test compares both encodings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeVar

from protocol.address.varint import decode_uvarint, encode_uvarint
from protocol.errors import RemoteProtocolError

MAX_CONTROL_MESSAGE_BYTES: Final = 4 << 20
"""Longest message accepted from p2pd; LIST_PEERS with thousands of peers stays below."""

_VARINT: Final = 0
_BYTES: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}

Field = tuple[int, int | bytes]
"""Field number and value: an int is written as varint, bytes behind their length."""


class RequestType(IntEnum):
    """Types of requests, `Request.type` on the wire."""

    IDENTIFY = 0
    CONNECT = 1
    STREAM_OPEN = 2
    STREAM_HANDLER = 3
    LIST_PEERS = 5
    PERSISTENT_CONN_UPGRADE = 9


_REQUEST_TYPE: Final = 1
_BODY_FIELD: Final = {
    RequestType.CONNECT: 2,
    RequestType.STREAM_OPEN: 3,
    RequestType.STREAM_HANDLER: 4,
}


def simple_request(kind: RequestType) -> bytes:
    """IDENTIFY, LIST_PEERS or PERSISTENT_CONN_UPGRADE."""
    return _request(kind, ())


def connect_request(peer: bytes, addresses: Sequence[bytes], timeout_s: int) -> bytes:
    """CONNECT to a peer (binary id) at binary multiaddrs."""
    fields: list[Field] = [(1, peer)]
    fields += [(2, address) for address in addresses]
    return _request(RequestType.CONNECT, [*fields, (3, timeout_s)])


def stream_open_request(peer: bytes, protocol: str, timeout_s: int) -> bytes:
    """STREAM_OPEN to a peer (binary id)."""
    return _request(RequestType.STREAM_OPEN, [(1, peer), (2, protocol.encode()), (3, timeout_s)])


def stream_handler_request(listener: bytes, protocol: str) -> bytes:
    """STREAM_HANDLER: bring streams of `protocol` to the listener (binary multiaddr)."""
    return _request(RequestType.STREAM_HANDLER, [(1, listener), (2, protocol.encode()), (3, 0)])


def _request(kind: RequestType, body: Sequence[Field]) -> bytes:
    fields: list[Field] = [(_REQUEST_TYPE, int(kind))]
    if kind in _BODY_FIELD:
        fields.append((_BODY_FIELD[kind], encode_fields(body)))
    return encode_fields(fields)


@dataclass(frozen=True, slots=True)
class PeerAddresses:
    """A peer (binary id) and its binary multiaddrs."""

    peer: bytes
    addresses: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Response:
    """p2pd's answer.

    Attributes:
        error: what went wrong, None when nothing did.
        identity: our own id and addresses (IDENTIFY).
        peers: connected peers, once for each connection (LIST_PEERS).
        stream: the stream that was opened (STREAM_OPEN).
    """

    error: str | None
    identity: PeerAddresses | None
    peers: tuple[PeerAddresses, ...]
    stream: "StreamInfo | None" = None


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """The peer at the other end of a stream, where it is (both binary), and the protocol."""

    peer: bytes
    address: bytes
    protocol: str


def parse_response(data: bytes) -> Response:
    """Read a Response.

    Raises:
        RemoteProtocolError: p2pd sent something else.
    """
    fields = decode_fields(data)
    error = decode_fields(one_of(fields, 2, bytes)).get(1, [b""])[0] if 2 in fields else None
    if error is None and fields.get(1) == [1]:
        error = b"no reason given"
    return Response(
        error=error.decode(errors="replace") if isinstance(error, bytes) else None,
        identity=_peer_addresses(one_of(fields, 4, bytes)) if 4 in fields else None,
        peers=tuple(_peer_addresses(one_of({6: [each]}, 6, bytes)) for each in fields.get(6, [])),
        stream=parse_stream_info(one_of(fields, 3, bytes)) if 3 in fields else None,
    )


def parse_stream_info(data: bytes) -> StreamInfo:
    """Read a StreamInfo.

    Raises:
        RemoteProtocolError: p2pd sent something else.
    """
    fields = decode_fields(data)
    protocol = one_of(fields, 3, bytes).decode(errors="replace")
    return StreamInfo(one_of(fields, 1, bytes), one_of(fields, 2, bytes), protocol)


def _peer_addresses(data: bytes) -> PeerAddresses:
    fields = decode_fields(data)
    addresses = (one_of({2: [each]}, 2, bytes) for each in fields.get(2, []))
    return PeerAddresses(one_of(fields, 1, bytes), tuple(addresses))


# --- fields, of any protobuf message --------------------------------------------------------------
T = TypeVar("T", int, bytes)


def one_of(
    fields: Mapping[int, list[int | bytes]], number: int, kind: type[T], default: T | None = None
) -> T:
    """The last value of a field; raises RemoteProtocolError: it is missing, or of another kind."""
    value = fields[number][-1] if number in fields else default
    if not isinstance(value, kind):
        raise RemoteProtocolError(f"field {number} of a message is missing, or no {kind.__name__}")
    return value


def encode_fields(fields: Sequence[Field]) -> bytes:
    """A protobuf message of these fields."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            out += encode_uvarint(number << 3 | _VARINT) + encode_uvarint(value)
        else:
            out += encode_uvarint(number << 3 | _BYTES) + encode_uvarint(len(value)) + value
    return bytes(out)


def decode_fields(data: bytes) -> dict[int, list[int | bytes]]:
    """Field number to its values in order; kinds of fields that no message here has are skipped."""
    fields: dict[int, list[int | bytes]] = {}
    offset = 0
    try:
        while offset < len(data):
            tag, offset = decode_uvarint(data, offset)
            value, offset = _decode_value(data, offset, tag & 7)
            fields.setdefault(tag >> 3, []).append(value)
    except ValueError as error:
        raise RemoteProtocolError(f"p2pd sent a message that cannot be read: {error}") from error
    return fields


def _decode_value(data: bytes, offset: int, wire_type: int) -> tuple[int | bytes, int]:
    if wire_type == _VARINT:
        return decode_uvarint(data, offset)
    if wire_type == _BYTES:
        size, offset = decode_uvarint(data, offset)
    elif wire_type in _FIXED_BYTES:
        size = _FIXED_BYTES[wire_type]
    else:
        raise ValueError(f"unknown wire type {wire_type}")
    if offset + size > len(data):
        raise ValueError("a field is cut off")
    return data[offset : offset + size], offset + size
