"""A terminal that is gone ends nothing: a closed SSH session, `| head`, a reader of logs that died.

1. SIGHUP is ignored, and so by all processes that are started from here: they inherit it.
2. When stdout or stderr takes no more, its descriptor is moved to a file: libraries that write to
   it, and later children, are heard too.
3. That file is bounded: a longer one is begun anew. Events are in the event log besides.
4. Where there is no such file (yet), what cannot be written stays in the stream's buffer, if it
   has room.

SIGTERM ends the process at once until the daemon heeds signals (signals.py). For process 1, as in a
container, the kernel knows no default: a signal without a handler is lost. So there is a handler
from the first line on, and no SIGTERM comes between an `exec` and that.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TextIO, cast

from peer.options.exit_codes import ExitCode
from peer.runtime.files import PRIVATE_FILE

CONSOLE_LOG: Final = "log/console.log"
"""That file, in a home."""
MAX_BYTES: Final = 1 << 22


class LastingStream:
    """A text stream that goes on in a file where its own end is gone."""

    def __init__(self, stream: TextIO, file: Path | None) -> None:
        self._stream = stream
        self._file = file
        self._moved = file is not None and _is(stream, file)  # by the process that became this one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self._moved and os.fstat(self._stream.fileno()).st_size > MAX_BYTES:
            os.ftruncate(self._stream.fileno(), 0)
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            if self._move(error):  # what it could not write is in its buffer still, if it has one
                unbuffered = getattr(self._stream, "write_through", False)
                with suppress(OSError):
                    (act if unbuffered else self._stream.flush)()

    def _move(self, why: OSError) -> bool:
        """Go on in the file. Returns whether that could be done."""
        if self._moved or self._file is None:
            return False
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_APPEND | os.O_CREAT, PRIVATE_FILE)
            sentence = (
                f"loco-peer: {self._stream.name} is gone ({why.strerror}); what it would show:\n"
            )
            try:
                os.write(descriptor, sentence.encode())
                os.dup2(descriptor, self._stream.fileno())
            finally:
                os.close(descriptor)
        except OSError:
            return False
        self._moved = True
        return True


def _is(stream: TextIO, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), file.stat())
    except (OSError, AttributeError):  # no such file, or no descriptor
        return False


def end_on_sigterm() -> None:
    """From now on SIGTERM ends the process at once, also one that was held back."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitCode.TERMINATED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def hold_back_sigterm() -> None:
    """Keep SIGTERM for `end_on_sigterm` of the program that this process is about to become."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def outlive_terminal(file: Path | None = None) -> None:
    """Go on where the terminal goes. Only from the main thread.

    Args:
        file: takes what would be shown then; its folder may be made later.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:
            setattr(sys, name, cast(TextIO, LastingStream(stream, file)))
