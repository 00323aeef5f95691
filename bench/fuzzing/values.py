"""Values of a message's fields, drawn from the types that the wire schema is made of.

Each kind of type that msgspec knows has a strategy here: what it takes, its extremes among it. A
`World` holds values of a live run (ids, digests, numbers of rounds): wherever a field takes one of
them it is drawn often, so that messages get past the first checks of who reads them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hypothesis import strategies as st
from msgspec import inspect

from protocol.wire.fields import Digest

Type = inspect.Type
DIGEST: Final = inspect.type_info(Digest)
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

    def of(self, name: str, kind: Type) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Values named so, and others, that a field of this type takes."""
        fitting = [
            tuple(value for value in values if _takes(kind, value))
            for values in (self.named.get(name, ()), self.values)
        ]
        return fitting[0], fitting[1]


NOWHERE: Final = World()

_built: dict[tuple[type, World], Values] = {}


def values_of(kind: Type, world: World = NOWHERE, name: str = "") -> Values:
    """What a field of this type may hold."""
    own = _STRATEGIES[type(kind)](kind, world, name)
    named, others = world.of(name, kind)
    known = [*([st.sampled_from(named)] * 3 if named else []), own]
    return st.one_of(*known, *([st.sampled_from(others)] if others else []))


def fields_of(kind: type) -> tuple[inspect.Field, ...]:
    """The fields of a message or of a part of one."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info.fields


def records_of(kind: type, world: World = NOWHERE) -> Values:
    """Messages of this type, or parts of some."""
    if (kind, world) not in _built:  # building takes longer than drawing
        drawn = {each.name: values_of(each.type, world, each.name) for each in fields_of(kind)}
        if "mask" in drawn:  # what ends with a zero is no mask
            drawn["mask"] = drawn["mask"].filter(lambda mask: mask[-1] != 0)
        _built[kind, world] = st.builds(kind, **drawn)
    return _built[kind, world]


def longest(kind: Type) -> Any:
    """A value of the most bytes that a field of this type may have on the wire."""
    match kind:
        case inspect.VarTupleType():
            return (longest(kind.item_type),) * _most(kind)
        case inspect.StructType():
            return longest_record(kind.cls)
        case inspect.UnionType():
            return longest(_some(kind))
    return _longest_plain(kind)


def _longest_plain(kind: Type) -> Any:
    match kind:
        case inspect.IntType() | inspect.FloatType():
            return _bounds(kind)[1]
        case inspect.BytesType():
            return b"\xff" * _most(kind)
        case inspect.EnumType():
            return max(kind.cls, key=lambda each: len(str(each)))
        case inspect.StrType():
            return _longest_text(kind)
    return True  # a flag


def longest_record(kind: type) -> Any:
    """A message of the most bytes, or a part of one."""
    return kind(**{each.name: longest(each.type) for each in fields_of(kind)})


def _takes(kind: Type, value: object) -> bool:
    if isinstance(kind, inspect.UnionType):
        return value is None or _takes(_some(kind), value)
    match kind, value:
        case inspect.IntType(), int():
            low, high = _bounds(kind)
            return type(value) is int and low <= value <= high
        case inspect.FloatType(), float() | int():
            low, high = _bounds(kind)
            return type(value) is not bool and low <= value <= high
        case inspect.StrType(), str():
            return _takes_text(kind, value)
        case inspect.BytesType(), bytes():
            return (kind.min_length or 0) <= len(value) <= _most(kind)
    return False


def _takes_text(kind: inspect.StrType, text: str) -> bool:
    fits = kind.pattern is None or re.search(kind.pattern, text) is not None
    return fits and text.isprintable() and len(text) <= _most(kind)


def _some(kind: inspect.UnionType) -> Type:
    """What is not None."""
    (some,) = (each for each in kind.types if not isinstance(each, inspect.NoneType))
    return some


def _most(kind: Any) -> int:
    """The longest value."""
    assert kind.max_length is not None, f"no bound: {kind}"
    return int(kind.max_length)


def _bounds(kind: Any) -> tuple[Any, Any]:
    """The least and the largest value."""
    low = kind.ge if kind.ge is not None else kind.gt + 1
    high = kind.le if kind.le is not None else kind.lt - 1
    return low, high


def _integers(kind: inspect.IntType, *_: object) -> Values:
    low, high = _bounds(kind)
    near = {low, low + 1, high - 1, high, *(1 << bits for bits in (7, 8, 16, 31, 32, 53, 62))}
    edges = sorted(number for number in near if low <= number <= high)
    small = st.integers(low, min(high, low + 64))
    return st.one_of(st.sampled_from(edges), small, st.integers(low, high))


def _reals(kind: inspect.FloatType, *_: object) -> Values:
    low, high = map(float, _bounds(kind))
    edges = [x for x in (low, high, 0.0, -0.0, 5e-324, 1e-9, 1.0) if low <= x <= high]
    return st.one_of(st.sampled_from(edges), st.floats(low, high), st.floats(low, min(high, 100.0)))


def _texts(kind: inspect.StrType, *_: object) -> Values:
    long = st.just(_longest_text(kind))
    if kind.pattern is None:
        return st.one_of(st.text(PRINTABLE, max_size=min(_most(kind), 40)), long)
    if kind == DIGEST:  # many choices by its pattern, one like this
        return st.one_of(st.binary(min_size=16, max_size=32).map(bytes.hex), long)
    inner = kind.pattern.removeprefix(r"\A").removesuffix(r"\Z")
    drawn = st.from_regex(inner, fullmatch=True, alphabet=PRINTABLE)
    return st.one_of(drawn.filter(lambda text: len(text) <= _most(kind)), long)


def _longest_text(kind: inspect.StrType) -> str:
    """Text of the most characters, where the pattern allows that."""
    stems = ("", "/", "a/1")
    for stem, filling in ((stem, filling) for stem in stems for filling in "~a0"):
        text = stem + filling * (_most(kind) - len(stem))
        if _takes_text(kind, text):
            return text
    return "a" * (_most(kind) - 10) + "/1"  # a protocol: its number is short


def _bytes(kind: inspect.BytesType, *_: object) -> Values:
    least, most = kind.min_length or 0, _most(kind)
    few = st.binary(min_size=least, max_size=max(least, min(most, 40)))
    return st.one_of(st.sampled_from([bytes(least), b"\xff" * most]), few)


def _lists(kind: inspect.VarTupleType, world: World, name: str) -> Values:
    item, most = values_of(kind.item_type, world, name), _most(kind)
    few = st.lists(item, max_size=min(FEW, most)).map(tuple)
    full = item.map(lambda one: (one,) * most)
    return st.one_of(few, few, few, full)


_STRATEGIES: Final[Mapping[type, Callable[[Any, World, str], Values]]] = {
    inspect.IntType: _integers,
    inspect.FloatType: _reals,
    inspect.BoolType: lambda *_: st.booleans(),
    inspect.StrType: _texts,
    inspect.BytesType: _bytes,
    inspect.EnumType: lambda kind, *_: st.sampled_from(list(kind.cls)),
    inspect.VarTupleType: _lists,
    inspect.UnionType: lambda kind, world, name: st.one_of(
        st.none(), values_of(_some(kind), world, name)
    ),
    inspect.StructType: lambda kind, world, _: records_of(kind.cls, world),
}
"""One for each kind of type: a new one is missed as soon as a message uses it."""
