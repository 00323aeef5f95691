"""Values of a message's fields, drawn from the checkers that the wire schema is made of.

Each kind of checker (protocol/wire/fields.py) has a strategy here: what it takes, its extremes
among it. A `World` holds values of a live run (ids, digests, numbers of rounds): wherever a field
takes one of them it is drawn often, so that messages get past the first checks of who reads them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from hypothesis import strategies as st

from protocol.wire.fields import (
    Binary,
    Bits,
    Checker,
    Choice,
    Digest,
    Flag,
    Integer,
    Many,
    Maybe,
    Real,
    Record,
    Text,
    UpTo,
    fields_of,
)

DIGEST: Final = get_args(Digest)[1]
Values = st.SearchStrategy[Any]

FEW: Final = 3
"""Items of most lists; some are as long as they may be."""
PRINTABLE: Final = st.characters(min_codepoint=32, max_codepoint=126)


@dataclass(frozen=True, eq=False)
class World:
    """Values of a live run.

    Attributes:
        values: of any kind; those that a field takes are drawn for it.
        named: those that belong to a field of this name, drawn more often.
        codes: what may follow a message as payload, genuine or nearly so.
    """

    values: tuple[Any, ...] = ()
    named: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    codes: tuple[bytes, ...] = ()

    def of(self, name: str, checker: Checker) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Values named so, and others, that a field takes."""
        fitting = [
            tuple(value for value in values if _takes(checker, value))
            for values in (self.named.get(name, ()), self.values)
        ]
        return fitting[0], fitting[1]


NOWHERE: Final = World()

_built: dict[tuple[type, World], Values] = {}


def values_of(checker: Checker, world: World = NOWHERE, name: str = "") -> Values:
    """What a field with this checker may hold, as the dataclass holds it."""
    own = _STRATEGIES[type(checker)](checker, world, name)
    named, others = world.of(name, checker)
    known = [*([st.sampled_from(named)] * 3 if named else []), own]
    return st.one_of(*known, *([st.sampled_from(others)] if others else []))


def records_of(kind: type, world: World = NOWHERE) -> Values:
    """Dataclasses whose fields are annotated with checkers."""
    if (kind, world) not in _built:  # building takes longer than drawing
        drawn = {f.name: values_of(f.checker, world, f.name) for f in fields_of(kind)}
        _built[kind, world] = st.builds(kind, **drawn)
    return _built[kind, world]


def longest(checker: Checker) -> Any:
    """A value of the most bytes that a field with this checker may have on the wire."""
    if isinstance(checker, Many):
        return (longest(checker.item),) * checker.max_items
    if isinstance(checker, Record):
        return longest_record(checker.kind)
    return longest(checker.inner) if isinstance(checker, Maybe) else _longest_plain(checker)


def _longest_plain(checker: Checker) -> Any:
    match checker:
        case Integer(_, value) | Real(_, value):
            return value
        case Binary(size) | UpTo(size):
            return b"\xff" * size
        case Bits(size):
            return _bits((1 << size) - 1)
        case Choice(choices):
            return max(choices, key=len)
        case Text():
            return _longest_text(checker)
    return True  # a flag


def longest_record(kind: type) -> Any:
    """A record or message of the most bytes."""
    return kind(**{field.name: longest(field.checker) for field in fields_of(kind)})


def _takes(checker: Checker, value: object) -> bool:
    try:
        checker.read(value)
    except ValueError:
        return False
    return not isinstance(checker, Choice | Flag | Many | Record)


def _integers(checker: Integer, *_: object) -> Values:
    low, high = checker.minimum, checker.maximum
    near = {low, low + 1, high - 1, high, *(1 << bits for bits in (7, 8, 16, 31, 32, 53, 62))}
    edges = sorted(number for number in near if low <= number <= high)
    small = st.integers(low, min(high, low + 64))
    return st.one_of(st.sampled_from(edges), small, st.integers(low, high))


def _reals(checker: Real, *_: object) -> Values:
    low, high = float(checker.minimum), float(checker.maximum)
    edges = [x for x in (low, high, 0.0, -0.0, 5e-324, 1e-9, 1.0) if low <= x <= high]
    return st.one_of(st.sampled_from(edges), st.floats(low, high), st.floats(low, min(high, 100.0)))


def _texts(checker: Text, *_: object) -> Values:
    long = st.just(_longest_text(checker))
    if checker.pattern == r".*":
        return st.one_of(st.text(PRINTABLE, max_size=min(checker.max_chars, 40)), long)
    if checker == DIGEST:  # many choices by its pattern, one like this
        return st.one_of(st.binary(min_size=16, max_size=32).map(bytes.hex), long)
    drawn = st.from_regex(checker.pattern, fullmatch=True, alphabet=PRINTABLE)
    return st.one_of(drawn.filter(lambda text: len(text) <= checker.max_chars), long)


def _longest_text(checker: Text) -> str:
    """Text of `max_chars`, where the pattern allows that."""
    stems = ("", "/", "a/1")
    for stem, filling in ((stem, filling) for stem in stems for filling in "~a0"):
        text = stem + filling * (checker.max_chars - len(stem))
        if _takes(checker, text):
            return text
    return "a" * (checker.max_chars - 10) + "/1"  # a protocol: its number is short


def _binaries(checker: Binary, *_: object) -> Values:
    size = checker.size_bytes
    return st.one_of(
        st.sampled_from([bytes(size), b"\xff" * size]), st.binary(min_size=size, max_size=size)
    )


def _up_to(checker: UpTo, *_: object) -> Values:
    few = st.binary(max_size=min(checker.max_bytes, 40))
    return st.one_of(few, st.sampled_from([b"", b"\x93" * checker.max_bytes]))


def _bits(number: int) -> bytes:
    return number.to_bytes((number.bit_length() + 7) // 8, "little")


def _sets(checker: Bits, *_: object) -> Values:
    few = st.integers(1, (1 << min(checker.size, 4)) - 1)
    edges = st.sampled_from([1, 1 << (checker.size - 1), (1 << checker.size) - 1])
    return st.one_of(few, edges, st.integers(1, (1 << checker.size) - 1)).map(_bits)


def _lists(checker: Many, world: World, name: str) -> Values:
    item = values_of(checker.item, world, name)
    few = st.lists(item, max_size=min(FEW, checker.max_items)).map(tuple)
    full = item.map(lambda one: (one,) * checker.max_items)
    return st.one_of(few, few, few, full)


_STRATEGIES: Final[Mapping[type, Callable[[Any, World, str], Values]]] = {
    Integer: _integers,
    Real: _reals,
    Flag: lambda *_: st.booleans(),
    Text: _texts,
    Binary: _binaries,
    UpTo: _up_to,
    Bits: _sets,
    Choice: lambda checker, *_: st.sampled_from(list(checker.choices)),
    Many: _lists,
    Maybe: lambda checker, world, name: st.one_of(st.none(), values_of(checker.inner, world, name)),
    Record: lambda checker, world, _: records_of(checker.kind, world),
}
"""One for each kind of checker: a new one is missed as soon as a message uses it."""
