"""How far something is, in one line at the bottom of a terminal, above which all else is printed.

1. Only where stderr is a terminal that moves its cursor, and this process stands before it.
   Elsewhere nothing is drawn, so logs and pipes get whole lines alone.
2. What this process prints removes the line first; it is drawn again when it is due, unless a line
   without its end was printed, such as a question.
3. What children print themselves comes behind the line, and is not lost.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from typing import Any, Final, TextIO, cast

from protocol.names import printable
from protocol.schedule.progress import TaskProgress, Tell, Watched, nobody, progress_sentence

DRAW_EVERY_S: Final = 1.0
USUAL_COLUMNS: Final = 80
"""The width of a terminal that does not say how wide it is."""
_ERASED: Final = "\r\x1b[K"


class BottomLine:
    """The line of one terminal. Threads may share it."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._lock = threading.RLock()
        self._is_drawn = False
        self._is_free = True

    def show(self, text: str) -> bool:
        """Draw it, or remove it where it is empty. Returns whether people see it."""
        with self._lock:
            self._remove()
            if text and self._is_free and self.is_seen:
                self._draw(text)
            return self._is_drawn

    @property
    def is_seen(self) -> bool:
        """Whether a terminal would show it now."""
        return (
            self._terminal.isatty()
            and os.environ.get("TERM") != "dumb"
            and _is_foreground(self._terminal.fileno())
        )

    def print(self, stream: TextIO, text: str) -> int:
        """Write to another stream of this terminal."""
        with self._lock:
            self._remove()
            self._is_free = text.endswith("\n") if text else self._is_free
            return stream.write(text)

    def _draw(self, text: str) -> None:
        room = (os.get_terminal_size(self._terminal.fileno()).columns or USUAL_COLUMNS) - 1
        self._write(_ERASED + printable(text).encode("ascii", "replace").decode()[:room])
        self._is_drawn = True

    def _remove(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self._write(_ERASED)

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the terminal is gone; whoever prints next finds out
            os.write(self._terminal.fileno(), text.encode())


def _is_foreground(descriptor: int) -> bool:
    """Whether it is ours, and not that of a shell that has put us into the background."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # a terminal that controls nobody
        return True


class _Above:
    """A stream whose lines are printed above a bottom line."""

    def __init__(self, stream: TextIO, line: BottomLine) -> None:
        self._stream = stream
        self._line = line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._line.print(self._stream, text)


@contextmanager
def bottom_line() -> Iterator[BottomLine]:
    """The line of this process; what is printed in the block is printed above it."""
    line, before = BottomLine(sys.stderr or StringIO()), (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = (
        cast(TextIO, _Above(stream, line)) if stream and stream.isatty() else stream
        for stream in before
    )
    try:
        yield line
    finally:
        sys.stdout, sys.stderr = before
        line.show("")


@contextmanager
def shown(doing: str) -> Iterator[Tell]:
    """Say in a terminal what the block does, if it lasts; it may tell how far it is."""
    with bottom_line() as line:
        if not line.is_seen:
            yield nobody
            return
        told, ended = deque([TaskProgress()], maxlen=1), threading.Event()
        given = doing, lambda: told[-1], line.show, ended.wait
        drawer = threading.Thread(target=keep_drawn, args=given, daemon=True)
        drawer.start()
        try:
            yield told.append
        finally:
            ended.set()
            drawer.join()


def keep_drawn(
    doing: str,
    told: Callable[[], TaskProgress],
    show: Callable[[str], object],
    wait: Callable[[float], bool],
    clock_s: Callable[[], float] = time.monotonic,
) -> None:
    """Show it every DRAW_EVERY_S, until `wait` says that it has ended."""
    watched, began_s = Watched(), clock_s()
    while not wait(DRAW_EVERY_S):
        now_s, progress = clock_s(), told()
        show(progress_sentence(watched.words(doing, progress, now_s), progress, now_s - began_s))
