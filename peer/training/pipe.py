"""Messages as bytes: between the daemon and its trainer over a socket pair.

A frame is a 4-byte big-endian length and a msgpack map: `{"kind": class name, field: value, ...}`.
Decoding is strict: an unknown kind, a missing or an extra field, or a value of the wrong type is a
`PipeError`. Both ends are ours, so an error here is a bug or a broken child, never a peer's doing;
still nothing is unpickled.

At the trainer's end (`SocketChannel`) a thread reads commands, so that the end of the daemon (end
of input) ends this process at once, even in the middle of a step that hangs. Nothing is lost by
that: what counts is in the daemon's memory.
"""

import dataclasses
import os
import queue
import socket
import struct
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

import msgpack

from .messages import TrainerCommand, TrainerEvent, TrainerSettings

# --- pipe -----------------------------------------------------------------------------------------

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


# --- channel --------------------------------------------------------------------------------------

_READ_BYTES: Final = 65536
_MAX_DESCRIPTORS: Final = 4
_EXIT_PARENT_GONE: Final = 0
_EXIT_BAD_PIPE: Final = 70
_COMMANDS: Final = get_args(TrainerCommand)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """What the daemon wants of this process, and the memory to do it in."""

    name: str
    settings: TrainerSettings
    descriptors: tuple[int, ...]


class SocketChannel:
    """Commands in, events out, over an inherited socket."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._received: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._descriptors: queue.SimpleQueue[int] = queue.SimpleQueue()
        # The daemon sends a handful of commands a round and waits for their effects: the queue
        # stays short.
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def next_task(self) -> Task:
        """Wait for a task. Raises PipeError."""
        begin = self._expect(Begin)
        settings = self._expect(TrainerSettings)
        # They came no later than the first byte of the order.
        descriptors = [self._descriptors.get_nowait() for _ in range(begin.num_descriptors)]
        return Task(begin.task, settings, tuple(descriptors))

    def _expect(self, kind: type[T]) -> T:
        message = self._received.get()
        if not isinstance(message, kind):
            raise PipeError(f"expected {kind.__name__}, got {type(message).__name__}")
        return message

    def next_command(self, *, wait: bool, timeout_s: float | None = None) -> TrainerCommand | None:
        """The next command; None when there is none and `wait` is false, or the time is over.

        Raises:
            PipeError
        """
        try:
            message = self._received.get(block=wait, timeout=timeout_s)
        except queue.Empty:
            return None
        if not isinstance(message, _COMMANDS):
            raise PipeError(f"{type(message).__name__} is no command")
        command: TrainerCommand = message
        return command

    def emit(self, event: TrainerEvent | ModelCreated) -> None:
        """Send an event; waits while the daemon has not read the ones before."""
        try:
            self._socket.sendall(encode(event))
        except OSError:
            os._exit(_EXIT_PARENT_GONE)

    def _read(self) -> None:
        decoder = Decoder()
        try:
            while True:
                data, descriptors, _, _ = socket.recv_fds(
                    self._socket, _READ_BYTES, _MAX_DESCRIPTORS
                )
                if not data:
                    break
                for descriptor in descriptors:
                    os.set_inheritable(descriptor, False)
                    self._descriptors.put(descriptor)
                for message in decoder.feed(data):
                    self._received.put(message)
        except PipeError as error:
            os.write(2, f"trainer: {error}\n".encode())
            os._exit(_EXIT_BAD_PIPE)
        except OSError:
            pass
        os._exit(_EXIT_PARENT_GONE)
