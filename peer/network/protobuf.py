"""Protobuf, as far as p2pd's control socket and libp2p's relays need it: varints and bytes.

hivemind's generated module would register itself in the process-wide protobuf pool, and cannot be
had without importing hivemind, which takes long. A test compares both encodings.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final, TypeVar

import trio

from protocol.address.varint import decode_uvarint, encode_uvarint
from protocol.errors import RemoteProtocolError

_FIXED_BYTES: Final = {1: 8, 5: 4}

Field = tuple[int, int | bytes]
"""Field number and value: an int is written as varint, bytes behind their length."""
Fields = Mapping[int, list[int | bytes]]
"""Field number to its values, in order."""
T = TypeVar("T", int, bytes)


class WireType(IntEnum):
    VARINT = 0
    BYTES = 2


def one_of(fields: Fields, number: int, kind: type[T], default: T | None = None) -> T:
    """The last value of a field; raises RemoteProtocolError: it is missing, or of another kind."""
    value = fields[number][-1] if number in fields else default
    if not isinstance(value, kind):
        raise RemoteProtocolError(f"field {number} of a message is missing, or no {kind.__name__}")
    return value


def all_of(fields: Fields, number: int) -> list[bytes]:
    """All values of a field of bytes; raises RemoteProtocolError: one is of another kind."""
    return [one_of({number: [each]}, number, bytes) for each in fields.get(number, [])]


def encode_fields(fields: Sequence[Field]) -> bytes:
    out = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            out += encode_uvarint(number << 3 | WireType.VARINT) + encode_uvarint(value)
        else:
            out += encode_uvarint(number << 3 | WireType.BYTES) + encode_uvarint(len(value)) + value
    return bytes(out)


def delimited(fields: Sequence[Field]) -> bytes:
    """A message behind its length."""
    message = encode_fields(fields)
    return encode_uvarint(len(message)) + message


def decode_fields(data: bytes) -> Fields:
    """The fields of a message. Raises RemoteProtocolError."""
    fields: dict[int, list[int | bytes]] = {}
    offset = 0
    try:
        while offset < len(data):
            tag, offset = decode_uvarint(data, offset)
            value, offset = _decode_value(data, offset, tag & 7)
            fields.setdefault(tag >> 3, []).append(value)
    except ValueError as error:
        raise RemoteProtocolError(f"a message that cannot be read: {error}") from error
    return fields


def _decode_value(data: bytes, offset: int, wire_type: int) -> tuple[int | bytes, int]:
    if wire_type == WireType.VARINT:
        return decode_uvarint(data, offset)
    if wire_type == WireType.BYTES:
        size, offset = decode_uvarint(data, offset)
    elif wire_type in _FIXED_BYTES:
        size = _FIXED_BYTES[wire_type]
    else:
        raise ValueError(f"unknown wire type {wire_type}")
    if offset + size > len(data):
        raise ValueError("a field is cut off")
    return data[offset : offset + size], offset + size


async def receive_exactly(connection: trio.SocketStream, num_bytes: int) -> bytes:
    """Receive this many bytes. Raises ValueError: the other side has closed the connection."""
    data = bytearray()
    while len(data) < num_bytes:
        piece = await connection.receive_some(num_bytes - len(data))
        if not piece:
            raise ValueError("it hung up")
        data += piece
    return bytes(data)
