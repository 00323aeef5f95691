"""Addresses in as few bytes as a directory record needs: the binary form of multiaddrs.

Only what a peer can be dialled at, in canonical form, and short: a longer one, or one that could be
written otherwise, is refused.
"""

from typing import Final

from . import multiaddr

MAX_COMPACT_ADDRESS_BYTES: Final = 120
MAX_HOST_NAME_CHARS: Final = 112


def address_to_bytes(address: str) -> bytes:
    """The binary form of a multiaddr's text.

    Raises:
        ValueError: not an address that a record can carry; the message says why.
    """
    try:
        data = multiaddr.to_bytes(address)
        text = multiaddr.from_bytes(data)
        parts = multiaddr.parse(text)
    except multiaddr.InvalidAddress as error:
        raise ValueError(str(error)) from error
    if text != address:
        raise ValueError(f"{address!r} is not in canonical form: {text}")
    if len(data) > MAX_COMPACT_ADDRESS_BYTES:
        raise ValueError(f"{address!r} needs more than {MAX_COMPACT_ADDRESS_BYTES} bytes")
    for name, value in parts:
        if name == "unix":
            raise ValueError(f"{address!r} is an address of one machine alone")
        if name.startswith("dns") and len(value) > MAX_HOST_NAME_CHARS:
            raise ValueError(f"{value!r} is longer than {MAX_HOST_NAME_CHARS} characters")
    return data


def address_from_bytes(data: bytes) -> str:
    """The text of a binary address.

    Raises:
        ValueError: not the canonical bytes of an address; the message says why.
    """
    try:
        text = multiaddr.from_bytes(data)
    except multiaddr.InvalidAddress as error:
        raise ValueError(str(error)) from error
    if address_to_bytes(text) != data:
        raise ValueError(f"{data.hex()} is not in canonical form")
    return text
