"""The base of all messages, and the types of their fields.

A message is an immutable struct of msgspec, and the types of its fields are the rules that are
enforced (`Count = Annotated[int, Meta(ge=0, ...)]`). msgspec takes exact types alone (True is no
integer, text is no bytes; a whole number is taken for a real one), no NaN where a number has
bounds, and no list of the wrong length. What a type cannot say is checked in `__post_init__`.

Every text and list has a bound, and text is printable, because it ends up in terminals and logs.
Digests and run ids are lower-case hex; peer ids and names have no character that means something to
a shell, a path or a terminal.
"""

from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from protocol.limits import (
    MAX_ADDRESS_CHARS,
    MAX_ADDRESSES_PER_PEER,
    MAX_COUNT,
    MAX_RECORD_ADDRESSES,
)

MAX_SECONDS: Final = 1e12
MAX_SENTENCE_CHARS: Final = 1000
ITEMWISE: Final = "itemwise"
"""Marks a list whose items stand for themselves: the codec leaves out one that cannot be said."""


class Message(Struct, frozen=True, tag_field="t"):
    """A message from one peer to another; its tag is its name on the wire."""

    max_payload_bytes: ClassVar[int] = 0


def matching(pattern: str, max_chars: int) -> Meta:
    """Text that matches the pattern as a whole."""
    return Meta(pattern=rf"\A(?:{pattern})\Z", max_length=max_chars)


def check_printable(name: str, text: str) -> None:
    """Raises ValueError: the text could do something to a terminal or a log."""
    if not text.isprintable():
        raise ValueError(f"{name} {text!r} is not printable")


Digest = Annotated[str, matching(r"([0-9a-f]{2}){16,32}", 64)]
PeerIdText = Annotated[str, matching(r"[0-9A-Za-z._-]+", 128)]
Name = Annotated[str, matching(r"[a-z0-9][a-z0-9_-]*", 32)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
NonNegative = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Address = Annotated[str, matching(r"/[!-~]+", MAX_ADDRESS_CHARS)]
Addresses = Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES_PER_PEER), ITEMWISE]
FewAddresses = Annotated[tuple[Address, ...], Meta(max_length=MAX_RECORD_ADDRESSES), ITEMWISE]
Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
"""Ed25519, as the key is."""
