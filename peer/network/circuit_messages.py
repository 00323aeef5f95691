"""The messages of libp2p's circuit relay, version 2, without any IO (libp2p/specs, relay).

A peer that cannot be dialled *reserves* a place at a relay: it says RESERVE on the hop protocol.
Another peer then says CONNECT to the relay, with the first one's id; the relay says CONNECT on the
stop protocol to that one; once both are told OK, the relay carries bytes between the two streams,
and both ends make an encrypted connection of them. So the relay reads nothing of what it carries.

    HopMessage    1 type (0 RESERVE, 1 CONNECT, 2 STATUS), 2 peer, 3 reservation, 5 status
    StopMessage   1 type (0 CONNECT, 1 STATUS), 2 peer, 4 status
    Peer          1 id            Reservation   1 expiry (Unix time)

We set no limit in the messages: p2pd would take the connection for one that is good for a few small
messages alone. Limits are kept by cutting (relay.py).
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from protocol.address.varint import encode_uvarint
from protocol.errors import RemoteProtocolError

from .p2pd_messages import Field, decode_fields, encode_fields

HOP: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP: Final = "/libp2p/circuit/relay/0.2.0/stop"
MAX_CIRCUIT_MESSAGE_BYTES: Final = 4096


class HopKind(IntEnum):
    """What is said to a relay, and by one."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class CircuitStatus(IntEnum):
    """How a relay, or the peer behind it, answers."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400


@dataclass(frozen=True, slots=True)
class HopRequest:
    """What a relay is asked.

    Attributes:
        peer: binary id of the one to connect to.
    """

    kind: HopKind
    peer: bytes = b""


@dataclass(frozen=True, slots=True)
class HopAnswer:
    """What a relay answers.

    Attributes:
        status: a number of `CircuitStatus`, or one that we do not know.
        expires_s: Unix time of the relay at which the reservation ends.
    """

    status: int
    expires_s: int = 0


def reserve_request() -> bytes:
    """RESERVE, with its length before it."""
    return _delimited([(1, int(HopKind.RESERVE))])


def connect_request(peer: bytes) -> bytes:
    """CONNECT to a peer, said to a relay, with its length before it."""
    return _delimited([(1, int(HopKind.CONNECT)), (2, encode_fields([(1, peer)]))])


def hop_answer(status: CircuitStatus, expires_s: int | None = None) -> bytes:
    """STATUS of a relay, with its length before it."""
    fields: list[Field] = [(1, int(HopKind.STATUS))]
    if expires_s is not None:
        fields.append((3, encode_fields([(1, expires_s)])))
    return _delimited([*fields, (5, int(status))])


def stop_request(peer: bytes) -> bytes:
    """CONNECT, said to the peer behind the relay: who wants to connect. With its length."""
    return _delimited([(1, 0), (2, encode_fields([(1, peer)]))])


def parse_hop_request(data: bytes) -> HopRequest:
    """What somebody asks of us as a relay.

    Raises:
        RemoteProtocolError: something else.
    """
    fields = decode_fields(data)
    kind = _number(fields, 1)
    if kind == HopKind.RESERVE:
        return HopRequest(HopKind.RESERVE)
    if kind == HopKind.CONNECT and 2 in fields:
        return HopRequest(HopKind.CONNECT, _bytes(decode_fields(_bytes(fields, 2)), 1))
    raise RemoteProtocolError(f"a relay was asked something of kind {kind}")


def parse_hop_answer(data: bytes) -> HopAnswer:
    """What a relay answers us.

    Raises:
        RemoteProtocolError: something else.
    """
    fields = decode_fields(data)
    if _number(fields, 1) != HopKind.STATUS:
        raise RemoteProtocolError("a relay answered without a status")
    expires_s = _number(decode_fields(_bytes(fields, 3)), 1) if 3 in fields else 0
    return HopAnswer(_number(fields, 5), expires_s)


def parse_stop_answer(data: bytes) -> int:
    """How the peer behind us as a relay answers.

    Raises:
        RemoteProtocolError: something else.
    """
    fields = decode_fields(data)
    if _number(fields, 1) != 1:
        raise RemoteProtocolError("it answered without a status")
    return _number(fields, 4)


def _delimited(fields: list[Field]) -> bytes:
    message = encode_fields(fields)
    return encode_uvarint(len(message)) + message


def _number(fields: dict[int, list[int | bytes]], field: int) -> int:
    value = fields.get(field, [0])[-1]
    if not isinstance(value, int):
        raise RemoteProtocolError(f"field {field} of a circuit's message is no number")
    return value


def _bytes(fields: dict[int, list[int | bytes]], field: int) -> bytes:
    value = fields.get(field, [b""])[-1]
    if not isinstance(value, bytes):
        raise RemoteProtocolError(f"field {field} of a circuit's message is a number")
    return value
