"""What a field of a message may hold: one checker per kind, as data.

A message's field is annotated with its checker (`Count = Annotated[int, Integer(0, MAX_COUNT)]`),
so that the declaration a person reads is the rule that is enforced. A checker takes the value as
msgpack gave it and returns it as the dataclass holds it, or raises `ValueError` with a sentence;
who is to blame for it depends on the direction, and is decided by the codec in messages.py.

Rules: exact types (True is no integer); no NaN or infinity; text is printable, because it ends up
in terminals and logs; every length has a bound.

Then the vocabulary of messages: the kinds of field that occur (a digest, a count, an address), each
with its bounds. Digests and run ids are lower-case hex; peer ids and names have no character that
means something to a shell, a path or a terminal.
"""

import re
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Final, Protocol, get_type_hints

from protocol.limits import (
    MAX_ADDRESSES_PER_PEER,
    MAX_CONTROL_PAYLOAD_BYTES,
    MAX_ITERATION,
    MAX_RECORD_ADDRESSES,
    MAX_RELAYS_OF_PATH,
    MAX_STRIPES,
    STATE_CHUNK_BYTES,
)

_AS_THEY_ARE: Final = frozenset({str, int, float, bytes, bool, type(None)})
"""Types of values that msgpack takes as they stand in a dataclass."""


class Checker(Protocol):
    """Turns a wire value into a field's value."""

    def read(self, value: Any) -> Any:
        """Raises ValueError: the value is not allowed; the message says why."""


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number within [minimum, maximum]."""

    minimum: int
    maximum: int

    def read(self, value: Any) -> int:
        if type(value) is not int:
            raise ValueError(f"is {_kind(value)}, not an integer")
        if not self.minimum <= value <= self.maximum:
            raise ValueError(f"is {value}, outside {self.minimum} to {self.maximum}")
        return value


@dataclass(frozen=True, slots=True)
class Real:
    """A finite number within [minimum, maximum]; an integer is taken too."""

    minimum: float
    maximum: float

    def read(self, value: Any) -> float:
        if type(value) is not int and type(value) is not float:
            raise ValueError(f"is {_kind(value)}, not a number")
        if not self.minimum <= value <= self.maximum:  # NaN compares false
            raise ValueError(f"is {value}, outside {self.minimum} to {self.maximum}")
        return float(value)


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def read(self, value: Any) -> bool:
        if type(value) is not bool:
            raise ValueError(f"is {_kind(value)}, not true or false")
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """Printable text of at most `max_chars` that matches `pattern` as a whole."""

    max_chars: int
    pattern: str = r".*"

    def read(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"is {_kind(value)}, not text")
        if len(value) > self.max_chars:
            raise ValueError(f"has {len(value)} characters; at most {self.max_chars} are allowed")
        if not value.isprintable() or re.fullmatch(self.pattern, value) is None:
            raise ValueError(f"is {value!r}, which does not match {self.pattern}")
        return value


@dataclass(frozen=True, slots=True)
class Binary:
    """Exactly `size_bytes` bytes."""

    size_bytes: int

    def read(self, value: Any) -> bytes:
        if not isinstance(value, bytes):
            raise ValueError(f"is {_kind(value)}, not bytes")
        if len(value) != self.size_bytes:
            raise ValueError(f"has {len(value)} bytes, not {self.size_bytes}")
        return value


@dataclass(frozen=True, slots=True)
class UpTo:
    """At most `max_bytes` bytes."""

    max_bytes: int

    def read(self, value: Any) -> bytes:
        if not isinstance(value, bytes):
            raise ValueError(f"is {_kind(value)}, not bytes")
        if len(value) > self.max_bytes:
            raise ValueError(f"has {len(value)} bytes; at most {self.max_bytes} are allowed")
        return value


@dataclass(frozen=True, slots=True)
class Bits:
    """A set of numbers below `size` as bits, the lowest first; its last byte is not zero."""

    size: int

    def read(self, value: Any) -> bytes:
        if not isinstance(value, bytes):
            raise ValueError(f"is {_kind(value)}, not bytes")
        if not value or not value[-1] or int.from_bytes(value, "little") >> self.size:
            raise ValueError(f"is no set of numbers below {self.size}, or an empty one")
        return value


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a closed list."""

    choices: type[StrEnum]

    def read(self, value: Any) -> StrEnum:
        if not isinstance(value, str):
            raise ValueError(f"is {_kind(value)}, not text")
        try:
            return self.choices(value)
        except ValueError:
            names = ", ".join(self.choices)
            raise ValueError(f"is {value[:64]!r}, not one of {names}") from None


@dataclass(frozen=True, slots=True)
class Many:
    """At most `max_items` of the same kind, as a tuple."""

    item: Checker
    max_items: int

    def read(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"is {_kind(value)}, not a list")
        if len(value) > self.max_items:
            raise ValueError(f"has {len(value)} items; at most {self.max_items} are allowed")
        return tuple(self.item.read(item) for item in value)


@dataclass(frozen=True, slots=True)
class Maybe:
    """The inner kind, or nothing."""

    inner: Checker

    def read(self, value: Any) -> Any:
        return None if value is None else self.inner.read(value)


@dataclass(frozen=True, slots=True)
class Record:
    """A map that holds a dataclass whose fields are annotated with checkers."""

    kind: type

    def read(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"is {_kind(value)}, not a map")
        return read_record(self.kind, value)


def read_record(kind: type, tree: dict[str, Any]) -> Any:
    """A `kind` out of a map; unknown keys are ignored, missing ones take their default.

    Raises:
        ValueError: a field, which is named, is missing or holds what its checker does not allow.
    """
    return kind(**{field.name: _read_field(field, tree) for field in fields_of(kind)})


def write_record(value: Any) -> dict[str, Any]:
    """The map that `read_record` takes back. Nothing is checked."""
    kind: type = type(value)
    return {name: _write(getattr(value, name)) for name in _names_of(kind)}


@dataclass(frozen=True, slots=True)
class WireField:
    """A field of a message or record, as it is declared.

    Attributes:
        checker: says what the field may hold.
        default: what a missing field is taken for; MISSING where it must not be missing.
    """

    name: str
    checker: Checker
    default: Any


@cache
def fields_of(kind: type) -> tuple[WireField, ...]:
    """The fields of a dataclass that are annotated with checkers, in order."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        WireField(field.name, hints[field.name].__metadata__[0], field.default)
        for field in fields(kind)
    )


@cache
def _names_of(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _read_field(field: WireField, tree: dict[str, Any]) -> Any:
    if field.name not in tree:
        if field.default is MISSING:
            raise ValueError(f"field '{field.name}' is missing")
        return field.default
    try:
        return field.checker.read(tree[field.name])
    except ValueError as error:
        raise ValueError(f"field '{field.name}' {error}") from None


def _write(value: Any) -> Any:
    if type(value) in _AS_THEY_ARE:  # most are
        return value
    if is_dataclass(value):
        return write_record(value)
    if isinstance(value, tuple):
        return [_write(item) for item in value]
    return value.value if isinstance(value, StrEnum) else value


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"of type {type(value).__name__}"


# --- the kinds of field that occur ----------------------------------------------------------------
MAX_COUNT: Final = (1 << 63) - 1
MAX_SECONDS: Final = 1e12
MAX_SENTENCE_CHARS: Final = 1000
MAX_PROTOCOLS: Final = 32
MAX_STATE_BYTES: Final = MAX_CONTROL_PAYLOAD_BYTES // 32 * STATE_CHUNK_BYTES
"""Largest state whose chunk digests fit into one payload (128 GiB: 16e9 parameters)."""

_DIGEST: Final = Text(64, r"([0-9a-f]{2}){16,32}")
_PEER_ID: Final = Text(128, r"[0-9A-Za-z._-]+")
MAX_ADDRESS_CHARS: Final = 256
_ADDRESS: Final = Text(MAX_ADDRESS_CHARS, r"/[!-~]+")

Digest = Annotated[str, _DIGEST]
MaybeDigest = Annotated[str | None, Maybe(_DIGEST)]
PeerIdText = Annotated[str, _PEER_ID]
MaybePeerId = Annotated[str | None, Maybe(_PEER_ID)]
Name = Annotated[str, Text(32, r"[a-z0-9][a-z0-9_-]*")]
Sentence = Annotated[str, Text(MAX_SENTENCE_CHARS)]
Count = Annotated[int, Integer(0, MAX_COUNT)]
Iteration = Annotated[int, Integer(0, MAX_ITERATION)]
MaybeCount = Annotated[int | None, Maybe(Integer(0, MAX_COUNT))]
Vectors = Annotated[int, Integer(1, 2)]
Stripes = Annotated[int, Integer(0, MAX_STRIPES)]
Seconds = Annotated[float, Real(-MAX_SECONDS, MAX_SECONDS)]
MaybeSeconds = Annotated[float | None, Maybe(Real(-MAX_SECONDS, MAX_SECONDS))]
NonNegative = Annotated[float, Real(0, MAX_SECONDS)]
MaybeNonNegative = Annotated[float | None, Maybe(Real(0, MAX_SECONDS))]
Addresses = Annotated[tuple[str, ...], Many(_ADDRESS, MAX_ADDRESSES_PER_PEER)]
FewAddresses = Annotated[tuple[str, ...], Many(_ADDRESS, MAX_RECORD_ADDRESSES)]
Protocols = Annotated[
    tuple[str, ...], Many(Text(64, r"[a-z][a-z0-9-]*/[1-9][0-9]{0,5}"), MAX_PROTOCOLS)
]
RelayPath = Annotated[tuple[str, ...], Many(_PEER_ID, MAX_RELAYS_OF_PATH)]
RelayStages = Annotated[tuple[int, ...], Many(Integer(1, MAX_RELAYS_OF_PATH), MAX_RELAYS_OF_PATH)]
