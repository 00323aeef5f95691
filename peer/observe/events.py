"""The event log: one line of JSON for everything that happens between peers, and one for people.

A structlog logger carries each event through three processors: stamp it (time, clock, peer), show
it on stderr, render it as JSON; the line then goes to the sink (a rotated file in real life, a
simulated disk in simulation). Nothing here can end a run: a line that cannot be written is counted
and forgotten.
"""

import json
import math
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import structlog
import trio

from peer.options.values import LogFormat
from protocol.names import short_id

from .console import said_of
from .event_names import FIELDS, EventName
from .log_file import MAX_LINE_BYTES

EventDict = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True)
class EventLogStatistics:
    """Counts of the lines of an event log.

    Attributes:
        lost: lines that could not be written.
        undocumented: fields that `FIELDS` does not list, as `Event.field`.
    """

    written: int
    lost: int
    undocumented: frozenset[str]


class Events(Protocol):
    """What takes events: the log itself, or one that adds to them what they are about."""

    def emit(self, name: EventName | str, /, **fields: Any) -> None:
        """Record that `name` happened."""


class NamedEvents:
    """Adds the same fields to every event."""

    def __init__(self, events: Events, **fields: Any) -> None:
        self._events = events
        self._fields = fields

    def emit(self, name: EventName | str, /, **fields: Any) -> None:
        """Record that `name` happened."""
        self._events.emit(name, **self._fields, **fields)


class EventLog:
    """Writes events.

    Args:
        write_line: takes one line without its newline (`LineFile.write_line`, or a simulated disk);
            may raise OSError.
        peer: our peer id.
        wall_time_s: the swarm's time, Unix seconds.
        log_format: what goes to `stream`.
        verbose: show people every event.
        stream: where people look; None shows nothing.
    """

    def __init__(
        self,
        write_line: Callable[[bytes], None],
        *,
        peer: str,
        wall_time_s: Callable[[], float],
        log_format: LogFormat = LogFormat.CONSOLE,
        verbose: bool = False,
        stream: TextIO | None = sys.stderr,
    ) -> None:
        self._write_line = write_line
        self._wall_time_s = wall_time_s
        self._log_format = log_format
        self._verbose = verbose
        self._stream = stream
        self._written = 0
        self._lost = 0
        self._undocumented: set[str] = set()
        self._logger = structlog.wrap_logger(
            self,
            processors=[self._stamp, self._show, _to_line],
            wrapper_class=structlog.BoundLoggerBase,
        ).bind(peer=peer)

    def emit(self, name: EventName | str, /, **fields: Any) -> None:
        """Record that `name` happened.

        Args:
            name: one of `EventName`.
            fields: as `FIELDS` lists them; values that JSON does not know are written as text.

        Raises:
            ValueError: no such event.
        """
        event = EventName(name)
        self._undocumented |= {f"{event}.{field}" for field in fields.keys() - FIELDS[event].keys()}
        self._logger._proxy_to_logger("msg", event, **fields)

    def statistics(self) -> EventLogStatistics:
        """Counts so far."""
        return EventLogStatistics(self._written, self._lost, frozenset(self._undocumented))

    def msg(self, line: str) -> None:
        """Take a rendered line (called by structlog)."""
        try:
            self._write_line(line.encode())
            self._written += 1
        except OSError:
            self._lost += 1
        if self._log_format is LogFormat.JSON:
            self._print(line)

    def _stamp(self, _logger: object, _method: str, event: EventDict) -> EventDict:
        stamp = {
            "time": round(self._wall_time_s(), 3),
            "monotonic_s": round(trio.current_time(), 6),
            "peer": event.pop("peer"),
            "event": str(event.pop("event")),
        }
        return {**stamp, **{key: _finite(value) for key, value in event.items()}}

    def _show(self, _logger: object, _method: str, event: EventDict) -> EventDict:
        if self._log_format is LogFormat.CONSOLE:
            if self._verbose:
                self._print(sentence(event))
            elif said := said_of(event):
                self._print(f"{_clock(event['time'])} {said}")
        return event

    def say(self, line: str) -> None:
        """Say something to people that is no event; not among lines of JSON."""
        if self._log_format is LogFormat.CONSOLE:
            self._print(f"{_clock(self._wall_time_s())} {line}")

    def _print(self, line: str) -> None:
        if self._stream is None:
            return
        try:
            print(_on_one_line(line), file=self._stream, flush=True)
        except (OSError, ValueError):
            self._stream = None  # the terminal is gone; the run goes on


def _on_one_line(line: str) -> str:
    """The line, harmless on a terminal: names and reasons in it come from other peers, too."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _to_line(_logger: object, _method: str, event: EventDict) -> str:
    line = _json(event)
    if len(line) <= MAX_LINE_BYTES:
        return line
    kept = {key: event[key] for key in ("time", "monotonic_s", "peer", "event")}
    return _json(kept | {"cut_bytes": len(line)})


def _json(event: EventDict) -> str:
    return json.dumps(event, default=_plain, separators=(",", ":"))


def _finite(value: Any) -> Any:
    """The value, with NaN and infinity as text: JSON has no word for them."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)


def sentence(event: EventDict) -> str:
    """One line for people who want all: time of day (UTC), event, fields."""
    stamped = ("time", "monotonic_s", "peer", "event")
    fields = [f"{key}={_short(key, value)}" for key, value in event.items() if key not in stamped]
    return " ".join([_clock(event["time"]), event["event"], *fields])


def _clock(time_s: float) -> str:
    seconds = int(time_s) % 86400
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _short(key: str, value: Any) -> str:
    if key in ("remote", "partner"):
        return short_id(value)
    match value:
        case float():
            return f"{value:.4g}"
        case list() | tuple():
            return ",".join(str(part) for part in value)
        case str() if " " in value or not value:
            return json.dumps(value, ensure_ascii=False)
        case _:
            return str(value)
