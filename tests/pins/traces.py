"""What is called while something walks through the code: functions, crossings of rooms, types.

A call of a coroutine counts once, however often it goes on.
"""

import inspect
import opcode
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Final, NamedTuple

import trio
from msgspec import Struct

ROOT: Final = Path(__file__).parents[2]
INLINED: Final = ("<listcomp>", "<setcomp>", "<dictcomp>")
"""Functions in some versions of Python, and none in others."""
SENDING: Final = {"encode_message": "message", "send": "command"}
"""Functions that are given a message, and the names of that argument."""
SUSPENDING: Final = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Walk(NamedTuple):
    """How long a walk is.

    Attributes:
        files: of peer/ and protocol/ in which something is called.
        functions: that are called.
        crossings: pairs of functions of which one calls the other, directly or through a library,
            and lies in another package.
        types: dataclasses of ours of which something is made, and kinds of messages that are sent
            (nothing of ours is called where those are made: they are structs of msgspec).
    """

    files: int
    functions: int
    crossings: int
    types: int


# --- tracing --------------------------------------------------------------------------------------
@cache
def place_of(filename: str) -> str | None:
    """A file of ours, as the repository names it; None for any other."""
    path = Path(filename)
    if not path.is_relative_to(ROOT):
        return None
    place = path.relative_to(ROOT).as_posix()
    return place if place.startswith(("peer/", "protocol/")) else None


def package_of(place: str) -> str:
    """The folder of a file."""
    return place.rpartition("/")[0]


def _is_transparent(code: CodeType) -> bool:
    return place_of(code.co_filename) is None or code.co_qualname.endswith(INLINED)


@cache
def _bytes_of(code: CodeType) -> bytes:
    return code.co_code


def _goes_on(frame: FrameType) -> bool:
    """Whether this is no call, but a coroutine or a generator that was called before."""
    if not frame.f_code.co_flags & SUSPENDING:
        return False
    code, at = _bytes_of(frame.f_code), frame.f_lasti
    name = opcode.opname[code[at]]
    return name == "YIELD_VALUE" or (name == "RESUME" and code[at + 1] & 3 != 0)


@dataclass(slots=True)
class Trace:
    """What is called between `begin` and `end`.

    Attributes:
        from_s: virtual time of `begin`.
        to_s: virtual time of `end`.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    crossings: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    types: Counter[str] = field(default_factory=Counter)
    from_s: float = 0.0
    to_s: float = 0.0

    def begin(self) -> None:
        """Trace from now on."""
        self.from_s = trio.current_time()
        sys.setprofile(self.note)

    def end(self) -> None:
        """Trace no more."""
        sys.setprofile(None)
        self.to_s = trio.current_time()

    async def during(self, other: "Trace") -> None:
        """Trace for the time in which another was traced."""
        await trio.sleep_until(other.from_s)
        self.begin()
        await trio.sleep_until(other.to_s)
        self.end()

    def note(self, frame: FrameType, event: str, result: object) -> None:
        """A function is called, or returns."""
        if event == "return" and isinstance(result, Struct) and frame.f_code.co_name == "receive":
            self._note_made(type(result))
        if event != "call":
            return
        code = frame.f_code
        place = place_of(code.co_filename)
        if place is None:
            if (code.co_filename, code.co_name) == ("<string>", "__init__"):
                self._note_made(type(frame.f_locals["self"]))
        elif not _goes_on(frame) and not code.co_qualname.endswith(INLINED):
            self.calls[place, code.co_qualname] += 1
            if (argument := SENDING.get(code.co_name, "")) in frame.f_locals:
                self._note_made(type(frame.f_locals[argument]))
            self._note_crossing(frame, place, code.co_qualname)

    def _note_made(self, made: type) -> None:
        """A dataclass's `__init__` lies in no file."""
        if made.__module__.startswith(("peer.", "protocol.")):
            self.types[f"{made.__module__}.{made.__qualname__}"] += 1

    def _note_crossing(self, frame: FrameType, place: str, name: str) -> None:
        caller = frame.f_back
        while caller is not None and _is_transparent(caller.f_code):
            caller = caller.f_back
        if caller is None:
            return
        by = place_of(caller.f_code.co_filename)
        if by is not None and package_of(by) != package_of(place):
            self.crossings[by, caller.f_code.co_qualname, place, name] += 1

    def without(self, idle: "Trace") -> "Trace":
        """What is here more often than there."""
        return Trace(
            self.calls - idle.calls,
            self.crossings - idle.crossings,
            self.types - idle.types,
            self.from_s,
            self.to_s,
        )

    @property
    def walk(self) -> Walk:
        """How long it is."""
        files = {place for place, _ in self.calls}
        return Walk(len(files), len(self.calls), len(self.crossings), len(self.types))
