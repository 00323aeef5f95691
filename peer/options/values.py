"""The values of options, as a shell or TOML has them.

Each function takes what was given and returns the value, or makes the function that does; a
ValueError says what would be right.
"""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from protocol.admission.statements import Token

MAX_ADDRESSES: Final = 64
"""How many an option takes."""


class LogFormat(StrEnum):
    """What goes to stderr."""

    CONSOLE = "console"
    """One short line per important event, for people."""
    JSON = "json"
    """The event log's own lines."""


def flag(value: Any) -> bool:
    """Yes or no, in the words of shells and TOML; nothing means no."""
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False}
    words |= {"no": False, "off": False, "": False}
    if str(value).strip().lower() not in words:
        raise ValueError("use 'true' or 'false'")
    return words[str(value).strip().lower()]


def many(parse: Callable[[str], str]) -> Callable[[Any], tuple[str, ...]]:
    """Addresses, each once; in one text they are separated by spaces or commas."""

    def parse_all(value: Any) -> tuple[str, ...]:
        texts = value.replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(texts, list | tuple):
            raise ValueError("use a list of addresses")
        if len(texts) > MAX_ADDRESSES:
            raise ValueError(f"at most {MAX_ADDRESSES} addresses are allowed")
        return tuple(dict.fromkeys(parse(str(text)) for text in texts))

    return parse_all


def whole(lowest: int, highest: int) -> Callable[[Any], int]:
    """A whole number from `lowest` to `highest`."""

    def parse(value: Any) -> int:
        digits = str(value).strip().removeprefix("-")
        if isinstance(value, bool) or not digits.isdecimal():
            raise ValueError("use a whole number")
        if not lowest <= int(value) <= highest:
            raise ValueError(f"must be from {lowest} to {highest}")
        return int(value)

    return parse


def number(unit: str, lowest: float, highest: float, zero: bool = False) -> Callable[[Any], float]:
    """A number of `unit`s from `lowest` to `highest`, or 0 where `zero` says so."""

    def parse(value: Any) -> float:
        try:
            count = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"use a number of {unit}, without a unit") from None
        if isinstance(value, bool) or not (lowest <= count <= highest or (zero and count == 0)):
            raise ValueError(f"must be {'0, or ' * zero}from {lowest:g} to {highest:.0f} {unit}")
        return count

    return parse


def source(value: Any) -> str:
    """Where a corpus is, as `data.source` of the run spec says it, or a file of tokens."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("use a file of tokens, or a source as in data.source of the run spec")
    return value


def token(value: Any) -> "Token":
    """An invitation."""
    from protocol.admission.statements import BadToken, Token  # here: it imports cryptography

    try:
        return Token.parse(str(value))
    except BadToken as error:
        raise ValueError(str(error)) from error


def device(value: Any) -> str:
    """`cpu`, `cuda` or `cuda:N`; whether it is here is looked at later."""
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", str(value)):
        raise ValueError("use 'cpu', 'cuda' or 'cuda:N'")
    return str(value)


def log_format(value: Any) -> LogFormat:
    """A format of the log on stderr."""
    if value not in tuple(LogFormat):
        raise ValueError(f"use {' or '.join(repr(str(known)) for known in LogFormat)}")
    return LogFormat(value)
