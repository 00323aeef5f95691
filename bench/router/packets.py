"""What a packet read from a TUN device is: where it goes, and how many bytes a wire would carry.

Before the packet stands a `virtio_net_hdr` of HEADER_BYTES (linux/virtio_net.h): how the packet
would be cut into segments, and where its checksum is still to be filled in. It is handed on as it
is, so the receiving kernel knows the same.

    flags u8, gso_type u8, hdr_len u16, gso_size u16, csum_start u16, csum_offset u16
"""

import struct
from dataclasses import dataclass
from typing import Final

HEADER_BYTES: Final = 10
_VNET: Final = struct.Struct("=BBHHHH")
_GSO_NONE: Final = 0
_IPV4: Final = 4
_IPV4_BYTES: Final = 20
_MULTICAST: Final = 224
"""The first byte of addresses that are no host's, and of all after them."""
_TCP_LENGTH_AT: Final = 12
"""Place of the byte whose upper half is the length of TCP's header, in words of four bytes."""


@dataclass(frozen=True, slots=True)
class Packet:
    """Attributes: destination, the last byte of the address; num_bytes, on the wire, IP and up."""

    destination: int
    num_bytes: int


def read_packet(data: bytes) -> Packet | None:
    """What stands in the headers; None for what is not for one host, or not IPv4."""
    ip_bytes = len(data) - HEADER_BYTES
    if ip_bytes < _IPV4_BYTES or data[HEADER_BYTES] >> 4 != _IPV4:
        return None
    if data[HEADER_BYTES + 16] >= _MULTICAST:
        return None
    destination = data[HEADER_BYTES + 19]
    _, gso_type, _, segment_bytes, transport_at, _ = _VNET.unpack_from(data)
    if gso_type == _GSO_NONE or not segment_bytes:
        return Packet(destination, ip_bytes)
    tcp_bytes = data[HEADER_BYTES + transport_at + _TCP_LENGTH_AT] >> 4 << 2
    header_bytes = transport_at + tcp_bytes
    segments = -(-(ip_bytes - header_bytes) // segment_bytes)
    return Packet(destination, ip_bytes + (segments - 1) * header_bytes)
