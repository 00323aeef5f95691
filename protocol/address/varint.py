"""Unsigned varints, as protobuf, multiaddr and multistream-select write lengths and codes.

Seven bits to a byte, the lowest first; the top bit says that more follow.
"""

from collections.abc import Awaitable, Callable
from typing import Final

MAX_UVARINT_BYTES: Final = 9


def encode_uvarint(number: int) -> bytes:
    """`number` (0 to 2**63 - 1) in as few bytes as it takes."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def decode_uvarint(data: bytes, offset: int = 0) -> tuple[int, int]:
    """The number at `offset`, and the offset behind it.

    Raises:
        ValueError: cut off, or longer than nine bytes.
    """
    number = 0
    for index in range(MAX_UVARINT_BYTES):
        if offset + index >= len(data):
            raise ValueError("a number is cut off")
        byte = data[offset + index]
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, offset + index + 1
    raise ValueError(f"a number has more than {MAX_UVARINT_BYTES} bytes")


async def read_delimited(
    exactly: Callable[[int], Awaitable[bytes]], max_bytes: int = 4096
) -> bytes:
    """The next message that has its length before it, and not one byte of what follows it.

    Args:
        exactly: reads so many bytes.

    Raises:
        ValueError: it is longer than allowed.
    """
    prefix = b""
    while not prefix or prefix[-1] & 0x80:
        if len(prefix) == MAX_UVARINT_BYTES:
            raise ValueError("the length of a message does not end")
        prefix += await exactly(1)
    length, _ = decode_uvarint(prefix)
    if length > max_bytes:
        raise ValueError(f"a message of {length} bytes; at most {max_bytes} are allowed")
    return await exactly(length)
