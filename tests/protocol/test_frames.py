"""Frames: what their prefix says, and what none may say. How they are cut: test_conversation.py."""

import struct

import pytest

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.limits import MAX_CONTROL_PAYLOAD_BYTES, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES
from protocol.wire.frames import FRAME_VERSION, MAGIC, PREFIX_BYTES, encode_frame, read_prefix


def prefix(
    magic: bytes = MAGIC, version: int = FRAME_VERSION, header: int = 0, payload: int = 0
) -> memoryview:
    return memoryview(struct.pack("<3sBIQ", magic, version, header, payload))


def test_a_prefix_comes_back() -> None:
    frame = encode_frame(b"header", 5)
    assert read_prefix(memoryview(frame), 5) == (6, 5)
    assert frame[PREFIX_BYTES:] == b"header"


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (prefix(magic=b"GET"), "not a loco-peer frame"),
        (prefix(version=2), "frame version 2"),
        (prefix(header=MAX_HEADER_BYTES + 1), "header of"),
        (prefix(payload=MAX_CONTROL_PAYLOAD_BYTES + 1), "payload of"),
    ],
)
def test_a_bad_prefix_is_refused(bad: memoryview, sentence: str) -> None:
    with pytest.raises(RemoteProtocolError, match=sentence):
        read_prefix(bad, MAX_CONTROL_PAYLOAD_BYTES)


def test_the_payload_bound_is_the_callers() -> None:
    assert read_prefix(prefix(payload=10), 10) == (0, 10)
    with pytest.raises(RemoteProtocolError, match="payload of 11 bytes"):
        read_prefix(prefix(payload=11), 10)
    with pytest.raises(RemoteProtocolError, match="payload of"):
        read_prefix(prefix(payload=MAX_PAYLOAD_BYTES + 1), MAX_PAYLOAD_BYTES * 4)


def test_what_we_may_not_send() -> None:
    with pytest.raises(LocalProtocolError, match="header"):
        encode_frame(b"x" * (MAX_HEADER_BYTES + 1))
    with pytest.raises(LocalProtocolError, match="payload"):
        encode_frame(b"", MAX_PAYLOAD_BYTES + 1)
    with pytest.raises(LocalProtocolError, match="payload"):
        encode_frame(b"", -1)
