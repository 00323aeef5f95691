"""Frames: how messages and their payloads are cut out of a byte stream.

    frame   = prefix header payload
    prefix  = magic "loc" (3 bytes), version (1), header length (u32), payload length (u64),
              little-endian: 16 bytes
    header  = one msgpack message (messages.py)
    payload = raw bytes

A length is checked when the prefix is complete, before a byte of it is waited for: the header's
against a fixed bound, the payload's against what the caller expects.
"""

import struct
from typing import Final

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.limits import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES

MAGIC: Final = b"loc"
FRAME_VERSION: Final = 1
_PREFIX: Final = struct.Struct("<3sBIQ")
PREFIX_BYTES: Final = _PREFIX.size


def encode_frame(header: bytes, payload_bytes: int = 0) -> bytes:
    """Prefix and header of a frame; the payload is to follow.

    Raises:
        LocalProtocolError: header or payload is longer than the protocol allows.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise LocalProtocolError(f"header of {len(header)} bytes; at most {MAX_HEADER_BYTES}")
    if not 0 <= payload_bytes <= MAX_PAYLOAD_BYTES:
        raise LocalProtocolError(f"payload of {payload_bytes} bytes; at most {MAX_PAYLOAD_BYTES}")
    return _PREFIX.pack(MAGIC, FRAME_VERSION, len(header), payload_bytes) + header


def read_prefix(data: memoryview, max_payload_bytes: int) -> tuple[int, int]:
    """The bytes of header and payload that follow, by the prefix at the start of `data`.

    Raises:
        RemoteProtocolError: not our frames, or a length out of bounds.
    """
    magic, version, header_bytes, payload_bytes = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise RemoteProtocolError(f"not a loco-peer frame: it begins with {magic.hex()}")
    if version != FRAME_VERSION:
        raise RemoteProtocolError(f"frame version {version}; this side speaks {FRAME_VERSION}")
    if header_bytes > MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"header of {header_bytes} bytes; at most {MAX_HEADER_BYTES}")
    if payload_bytes > min(max_payload_bytes, MAX_PAYLOAD_BYTES):
        raise RemoteProtocolError(
            f"payload of {payload_bytes} bytes; at most {max_payload_bytes} expected"
        )
    return header_bytes, payload_bytes
