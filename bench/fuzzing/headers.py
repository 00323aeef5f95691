"""Headers of messages: valid ones, and ones with a field that is replaced, removed or added."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, Final

import msgpack
import msgspec
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError
from protocol.wire.fields import Message
from protocol.wire.messages import TYPES, decode_message, encode_message

from .values import NOWHERE, Values, World, records_of

Messages = st.SearchStrategy[Message]
Headers = st.SearchStrategy[bytes]
Place = tuple[Any, ...]
"""Keys and indexes that lead to a value of a tree."""

NAMES: Final = {kind: name for name, kind in TYPES.items()}
KINDS: Final = tuple(sorted(NAMES, key=lambda kind: kind.__name__))
DAMAGES: Final = ("replace", "replace", "remove", "add")
INT64: Final = 1 << 63


def messages_of(kind: type[Message], world: World = NOWHERE) -> Messages:
    """Messages of this type that may be sent."""
    return records_of(kind, world)


@cache
def anything() -> Values:
    """All that msgpack can hold."""
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-INT64, 2 * INT64 - 1),
        st.sampled_from([-INT64, -1, 0, INT64 - 1, INT64, 2 * INT64 - 1, math.nan, math.inf]),
        st.sampled_from(["", b"", b"\0", "\n", "\x1b[31m", "\u202e"]),
        st.floats(),
        st.text(max_size=20),
        st.binary(max_size=20),
        st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
        st.just(msgpack.Timestamp(1, 0)),
    )
    keys = st.one_of(st.text(max_size=4), st.binary(max_size=4), st.integers(0, 3))

    def nested(inner: Values) -> Values:
        return st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3))

    return st.one_of(
        st.sampled_from([[], {}, [[]], [{}], [None]]), st.recursive(scalars, nested, max_leaves=6)
    )


@st.composite
def damaged_headers(draw: Callable[..., Any], message: Message) -> bytes:
    """The header of this message, but one thing in it is wrong, or missing, or too much."""
    tree = msgspec.to_builtins(message, builtin_types=(bytes,))
    return packed(draw(damaged_trees(tree)))


@st.composite
def damaged_trees(draw: Callable[..., Any], tree: Any) -> Any:
    """This map or list, but one thing in it is wrong, or missing, or too much."""
    tree = copy.deepcopy(tree)
    place = draw(st.sampled_from(list(places_in(tree))))
    holder = tree
    for step in place[:-1]:
        holder = holder[step]
    match draw(st.sampled_from(DAMAGES)):
        case "replace":
            others = st.one_of(anything(), st.sampled_from(sorted(TYPES)))
            near = st.sampled_from(near_values(holder[place[-1]]))
            holder[place[-1]] = draw(near if draw(st.booleans()) else others)
        case "remove":
            del holder[place[-1]]
        case _ if isinstance(tree, dict):
            tree[draw(st.text(max_size=8))] = draw(anything())
        case _:
            tree.append(draw(anything()))
    return tree


@st.composite
def with_damage(
    draw: Callable[..., Any], kind: type[Message], world: World = NOWHERE
) -> tuple[Message, bytes]:
    """A message of this type, and the header of the same one damaged."""
    message = draw(messages_of(kind, world))
    return message, draw(damaged_headers(message))


def check(message: Message, damaged: bytes) -> None:
    """What may be said comes through; what is damaged is their fault, or may be said."""
    assert decode_message(encode_message(message)) == message
    with suppress(RemoteProtocolError):
        taken = decode_message(damaged)
        assert decode_message(encode_message(taken)) == taken


def near_values(value: Any) -> list[Any]:
    """Values like this one: emptier, longer, of a kind that is nearly the same."""
    match value:
        case bytes() | str():
            return [value[:0], value[:-1], value * 2, value * 2000, *_other_text(value)]
        case int() | float():
            return [-value, -1, math.nan, math.inf, bool(value), value / 2, str(value), 1 << 63]
        case list():
            return [
                [],
                value[:-1],
                value * 2,
                [*value, None],
                {str(i): v for i, v in enumerate(value)},
            ]
        case dict():
            return [{}, list(value.values()), list(value), {**value, "more": value}]
    return [0, 1, "", [], {}]


def _other_text(value: bytes | str) -> list[Any]:
    """The same as text, or as bytes, and in capitals."""
    if isinstance(value, str):
        return [value.encode(), value.upper(), value + "\n", value + "\u00e9"]
    return [value.hex(), list(value), value + b"\0", bytes(len(value))]


def places_in(tree: Any, above: Place = ()) -> Iterator[Place]:
    """Every value in a tree; of a list the first items."""
    keys: list[Any] = []
    if isinstance(tree, dict):
        keys = list(tree)
    elif isinstance(tree, list):
        keys = list(range(min(len(tree), 2)))
    for key in keys:
        yield (*above, key)
        yield from places_in(tree[key], (*above, key))


def packed(tree: Any) -> bytes:
    """A header that holds this tree, whatever is in it."""
    header: bytes = msgpack.packb(tree)
    return header
