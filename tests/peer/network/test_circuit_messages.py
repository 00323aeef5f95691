"""The messages of circuit relays, against bytes that go-libp2p has written and read."""

import pytest
from network_worlds import peer_id_of

from peer.network.protobuf import delimited, encode_fields
from peer.network.relay import (
    HOP_ANSWER,
    STOP_ANSWER,
    CircuitStatus,
    HopKind,
    hop_answer,
    parse_hop_request,
    parse_status,
    stop_request,
)
from protocol.address.peer_id import peer_id_to_bytes
from protocol.errors import RemoteProtocolError

PEER = peer_id_to_bytes(peer_id_of("someone"))


def test_requests_come_back() -> None:
    reserve = delimited([(1, int(HopKind.RESERVE))])
    assert reserve == b"\x02\x08\x00"
    assert parse_hop_request(reserve[1:]) is None
    asked = delimited([(1, int(HopKind.CONNECT)), (2, encode_fields([(1, PEER)]))])
    assert asked[0] == len(asked) - 1
    assert parse_hop_request(asked[1:]) == PEER


def test_answers_come_back() -> None:
    plain, reserved = hop_answer(CircuitStatus.OK), hop_answer(CircuitStatus.OK, 1_795_391_655)
    assert parse_status(plain[1:], *HOP_ANSWER) == 100
    assert parse_status(reserved[1:], *HOP_ANSWER) == 100
    refused = hop_answer(CircuitStatus.NO_RESERVATION)
    assert parse_status(refused[1:], *HOP_ANSWER) == CircuitStatus.NO_RESERVATION


def test_what_a_go_relay_says_is_read() -> None:
    limited = b"\x08\x02\x1a\x06\x08\xbf\x9a\x8e\xd8\x06\x22\x06\x08\x78\x10\x80\x80\x08\x28\x64"
    assert parse_status(limited, *HOP_ANSWER) == 100
    assert parse_status(b"\x08\x01\x20\x64", *STOP_ANSWER) == CircuitStatus.OK


def test_the_peer_behind_is_told_who_comes() -> None:
    asked = stop_request(PEER)
    assert asked[1:3] == b"\x08\x00"
    assert PEER in asked


@pytest.mark.parametrize(
    "data", [b"\x08\x02", b"\x08\x01", b"\x0a\x01a", b"\x08\x01\x10\x01", b"\xff"]
)
def test_other_things_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_hop_request(data)
