"""The event log: one line of JSON for everything that happens between peers, and one for people.

Nothing here can end a run: a line that cannot be written is forgotten.

Each line is one `write` to a file opened with O_APPEND, so a crash of the process tears nothing,
and a crash of the machine at most the end of the file. The writer closes a torn last line before it
goes on; readers pass over what is no JSON. Files are rotated by size: `events.jsonl`, then
`events.jsonl.1`, the older the higher.
"""

import json
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

import trio

from peer.options.values import LogFormat
from peer.runtime import PeerId
from protocol.limits import MAX_HEADER_BYTES
from protocol.names import printable, short_id

from .event_names import EventName

MAX_ERROR_CHARS: Final = 400
"""Kept of an error's message: a stranger may have written part of it."""
TAIL_LINES: Final = 100
_STAMPED: Final = ("time", "monotonic_s", "peer", "event")
"""Fields of every event."""


def said_of(event: Mapping[str, Any], *, verbose: bool = False) -> str | None:
    """The console's words for an event: its sentence, or all its fields; None shows nothing."""
    sentence = EventName(event["event"]).sentence
    if sentence is None and not verbose:
        return None
    if sentence is not None and not verbose:
        # A field may be missing, or be no number this time.
        with suppress(KeyError, ValueError, TypeError):
            return sentence.format_map({key: _readable(key, of) for key, of in event.items()})
    fields = (f"{key}={_short(key, of)}" for key, of in event.items() if key not in _STAMPED)
    return " ".join([event["event"], *fields])


def _readable(key: str, value: Any) -> Any:
    if key in ("remote", "partner") and isinstance(value, str):
        return short_id(value)
    if key.endswith("loss") and isinstance(value, float):
        return f"{value:.4f}"
    if key == "over":
        return " (the end of the run)" if value else ""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:,}" if key in ("step", "followed_step") else value


def _short(key: str, value: Any) -> str:
    match value:
        case str() if key in ("remote", "partner"):
            return short_id(value)
        case float():
            return f"{value:.4g}"
        case list() | tuple():
            return ",".join(map(str, value))
        case str() if " " in value or not value:
            return json.dumps(value, ensure_ascii=False)
        case _:
            return str(value)


class Events(Protocol):
    def emit(self, name: EventName | str, /, **fields: Any) -> None: ...


class NamedEvents:
    def __init__(self, events: Events, **fields: Any) -> None:
        self._events = events
        self._fields = fields

    def emit(self, name: EventName | str, /, **fields: Any) -> None:
        self._events.emit(name, **self._fields, **fields)


class EventLog:
    """Stamps and writes events.

    Args:
        write_line: takes one line without its newline (`LineFile.write_line`, or a simulated disk);
            may raise OSError.
        peer: our peer id.
        wall_time_s: the swarm's time, Unix seconds.
        log_format: of `stream`, where people look; None shows nothing.

    Attributes:
        tail: the last lines for people, whatever the format.
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
        self._peer = peer
        self._wall_time_s = wall_time_s
        self._log_format = log_format
        self._verbose = verbose
        self._stream = stream
        self.tail = deque[str](maxlen=TAIL_LINES)

    def emit(self, name: EventName | str, /, **fields: Any) -> None:
        """Values that JSON does not know are written as text, and of a long event its length alone.

        Raises ValueError: no such event.
        """
        event: dict[str, Any] = {
            "time": round(self._wall_time_s(), 3),
            "monotonic_s": round(trio.current_time(), 6),
            "peer": self._peer,
            "event": str(EventName(name)),
        }
        event |= {key: _finite(value) for key, value in fields.items()}
        said = said_of(event, verbose=self._verbose)
        if said is not None:
            self._tell(event["time"], said)
        line = _json(event)
        if len(line) > MAX_HEADER_BYTES:
            line = _json({key: event[key] for key in _STAMPED} | {"cut_bytes": len(line)})
        with suppress(OSError):
            self._write_line(line.encode())
        if self._log_format is LogFormat.JSON:
            self._print(line)

    def stream_failed(self, peer_id: PeerId, protocol: str, error: BaseException) -> None:
        self._bug(EventName.STREAM_FAILED, error, remote=peer_id, protocol=protocol)

    def request_failed(self, request: str, error: BaseException) -> None:
        self._bug(EventName.REQUEST_FAILED, error, request=request)

    def _bug(self, name: EventName, error: BaseException, **where: str) -> None:
        kind, detail = type(error).__name__, str(error)[:MAX_ERROR_CHARS]
        self.emit(name, **where, error=kind, detail=detail)

    def say(self, line: str) -> None:
        """Show people what is no event, unless they see lines of JSON."""
        self._tell(self._wall_time_s(), line)

    def _tell(self, time_s: float, said: str) -> None:
        line = f"{_clock(time_s)} {said}"
        self.tail.append(printable(line)[:MAX_ERROR_CHARS])
        if self._log_format is LogFormat.CONSOLE:
            self._print(line)

    def _print(self, line: str) -> None:
        """Show a line, made harmless on a terminal: others have written part of it."""
        if self._stream is None:
            return
        try:
            print(printable(line), file=self._stream, flush=True)
        except (OSError, ValueError):
            self._stream = None  # the terminal is gone; the run goes on


def _json(event: Mapping[str, Any]) -> str:
    return json.dumps(event, default=_plain, separators=(",", ":"))


def _finite(value: Any) -> Any:
    """The value, with NaN and infinity as text: JSON has no word for them."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)


def _clock(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%H:%M:%S}"


class LineFile:
    """A rotated file of lines, for one writer; the current one counts among those kept."""

    def __init__(self, path: Path, max_file_bytes: int = 16 << 20, keep_files: int = 5) -> None:
        """Raises OSError."""
        self._path = path
        self._max_file_bytes = max_file_bytes
        self._keep_files = keep_files
        self._torn = False
        self._take(_opened(path))

    def write_line(self, line: bytes) -> None:
        """Append `line` and a newline. Raises OSError: it was not written, or not whole."""
        data = (b"\n" if self._torn else b"") + line + b"\n"
        if self._size_bytes and self._size_bytes + len(data) > self._max_file_bytes:
            self._rotate()
            data = line + b"\n"
        written = os.write(self._descriptor, data)
        self._size_bytes += written
        self._torn = written < len(data)
        if self._torn:
            raise OSError(f"{self._path}: wrote {written} of {len(data)} bytes")

    def close(self) -> None:
        os.close(self._descriptor)

    def _take(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size_bytes = os.fstat(self._descriptor).st_size
        last = os.pread(self._descriptor, 1, self._size_bytes - 1) if self._size_bytes else b"\n"
        self._torn = last != b"\n"

    def _rotate(self) -> None:
        """Go on in a new file. What fails leaves the old one open: there may be no other."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        descriptor = _opened(fresh)
        old = self._descriptor
        for number in range(self._keep_files - 1, 0, -1):
            older = self._path if number == 1 else rotated(self._path, number - 1)
            if older.exists():
                os.replace(older, rotated(self._path, number))
        os.replace(fresh, self._path)
        self._take(descriptor)
        os.close(old)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def rotated(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
