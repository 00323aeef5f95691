"""What is said to a relay, and by a peer behind one: right, damaged, and with a wrong length."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from hypothesis import strategies as st

from peer.network.protobuf import encode_fields
from peer.network.relay import HopKind
from protocol.address.peer_id import peer_id_to_bytes
from protocol.address.varint import encode_uvarint

from .headers import damaged_trees

OK: Final = 100
LAST_FIELD: Final = (1 << 29) - 1
MOST: Final = (1 << 64) - 1

ANSWERS: Final = {
    "hop": [[1, int(HopKind.STATUS)], [3, [[1, 2_000_000_000]]], [5, OK]],
    "stop": [[1, 1], [4, OK]],
}
"""Fields with their values; one that is a list has fields itself."""


def requests(peers: Sequence[str]) -> list[Any]:
    """Fields of what a relay is asked: for a place, and to lead to each of these peers."""
    targets = [[1, peer_id_to_bytes(peer)] for peer in peers]
    return [[[1, int(HopKind.RESERVE)]], *([[1, 1], [2, [target]]] for target in targets)]


def encoded(fields: Any) -> bytes:
    """The bytes of fields; what is none is written down as it is."""
    out = b""
    for field in fields if isinstance(fields, list) else [fields]:
        match field:
            case [int() as number, value]:
                said = abs(value) & MOST if isinstance(value, int) else encoded(value)
                out += encode_fields([(abs(number) & LAST_FIELD, said)])
            case bytes():
                out += field
            case _:
                out += repr(field).encode()
    return out


@st.composite
def said_to_relays(draw: Callable[..., Any], peers: Sequence[str]) -> bytes:
    """What goes out on a stream, most often right: a relay does little for one without a place.

    Args:
        peers: the last is the one that speaks, so that a relay leads it to itself.
    """
    place, *ways = requests(peers)
    trees = [place] * 4 + ways[-1:] * 4 + ways + [*ANSWERS.values()] * 2
    tree = draw(st.sampled_from(trees))
    message = encoded(tree if draw(st.integers(0, 2)) else draw(damaged_trees(tree)))
    right = len(message)
    length = draw(st.sampled_from([right] * 9 + [right + 1, right // 2, MOST]))
    return encode_uvarint(length) + message
