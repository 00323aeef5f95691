"""Messages as bytes: between the daemon and its trainer over a socket pair.

A frame is a 4-byte big-endian length and a msgpack map: `{"kind": class name, field: value, ...}`.
Decoding is strict: an unknown kind, a missing or an extra field, or a value of the wrong type is a
`PipeError`. Both ends are ours, so an error here is a bug or a broken child, never a peer's doing;
still nothing is unpickled.
"""

import dataclasses
import struct
import types
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final, get_args, get_origin, get_type_hints

import msgpack

from .messages import TrainerCommand, TrainerEvent
from .settings import TrainerSettings

MAX_FRAME_BYTES: Final = 4 * 1024 * 1024
"""Longest frame: a run spec, or the members of a round (4096 of them), with room to spare."""
_LENGTH: Final = struct.Struct(">I")


@dataclasses.dataclass(frozen=True, slots=True)
class Begin:
    """What a child is to do; its settings follow.

    Attributes:
        num_descriptors: that come with it, beside the bytes.
    """

    task: str
    num_descriptors: int


@dataclasses.dataclass(frozen=True, slots=True)
class ModelCreated:
    """Answer of a child that made the initial weights.

    Attributes:
        shapes: (name, shape) of each parameter that was made.
        whole: of each of the whole model.
        config: the model's config.json.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    whole: tuple[tuple[str, tuple[int, ...]], ...]
    config: str


Message = Begin | TrainerSettings | TrainerCommand | TrainerEvent | ModelCreated

_KINDS: Final[dict[str, type[Any]]] = {
    kind.__name__: kind
    for kind in (
        *get_args(TrainerCommand),
        *get_args(TrainerEvent),
        Begin,
        TrainerSettings,
        ModelCreated,
    )
}
_FIELDS: Final[dict[str, dict[str, Any]]] = {
    name: {field.name: get_type_hints(kind)[field.name] for field in dataclasses.fields(kind)}
    for name, kind in _KINDS.items()
}


class PipeError(Exception):
    """What came through the pipe is not a message."""


def encode(message: Message) -> bytes:
    """One frame."""
    kind = type(message).__name__
    body: bytes = msgpack.packb(
        {"kind": kind, **{name: getattr(message, name) for name in _FIELDS[kind]}}
    )
    if len(body) > MAX_FRAME_BYTES:
        raise PipeError(f"a {kind} of {len(body)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Bytes in, messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Message]:
        """Add received bytes and yield the messages that are complete. Raises PipeError."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise PipeError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield _decode(body)


def _decode(body: bytes) -> Message:
    try:
        tree = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise PipeError(f"not msgpack: {error}") from error
    kind = tree.pop("kind", None) if isinstance(tree, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise PipeError(f"no such message: {kind!r}")
    fields = _FIELDS[kind]
    if tree.keys() != fields.keys():
        raise PipeError(f"{kind} with fields {sorted(map(str, tree))}, not {sorted(fields)}")
    values = {name: _typed(tree[name], hint, f"{kind}.{name}") for name, hint in fields.items()}
    message: Message = _KINDS[kind](**values)
    return message


def _typed(value: Any, hint: Any, where: str) -> Any:
    """`value` as `hint` (a scalar, one or None, or a tuple of such); lists become tuples."""
    if get_origin(hint) is tuple:
        return _tuple(value, get_args(hint), where)
    if isinstance(hint, types.UnionType):
        (some,) = (kind for kind in get_args(hint) if kind is not types.NoneType)
        return None if value is None else _typed(value, some, where)
    if hint is float and type(value) is int:
        return float(value)
    if issubclass(hint, StrEnum) and value in tuple(hint):
        return hint(value)
    if type(value) is not hint:
        raise PipeError(f"{where} is {type(value).__name__}, not {hint.__name__}")
    return value


def _tuple(value: Any, hints: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise PipeError(f"{where} is {type(value).__name__}, not a list")
    if hints[-1] is Ellipsis:
        return tuple(_typed(item, hints[0], where) for item in value)
    if len(value) != len(hints):
        raise PipeError(f"{where} has {len(value)} items, not {len(hints)}")
    return tuple(_typed(item, hint, where) for item, hint in zip(value, hints, strict=True))
