"""A real terminal (pty) and a program in it, as a person has them before them."""

import os
import pty
import re
import select
import signal
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 60.0


class Terminal:
    def __init__(self, pid: int, end: int) -> None:
        self._pid, self._end = pid, end
        self._code: int | None = None
        self.shown = ""
        self._seen = 0

    def send(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, text: str) -> str:
        """Read until this is shown, once more; all that is shown up to there, since the last."""
        while text not in self._plain()[self._seen :]:
            assert self._read(), f"it ended; it showed {self._plain()[self._seen :]!r}"
        start = self._seen
        self._seen = self._plain().index(text, start) + len(text)
        return self._plain()[start : self._seen]

    def code(self) -> int:
        """Read until it has ended, and return its exit code."""
        while self._read():
            pass
        return self._ended()

    def leave(self, key: str) -> int:
        """Press this key until it has ended, and return its exit code.

        Once may not do: a signal that comes between a prompt's last letter and the wait for its
        answer is noted by Python, but wakes no read; the next one does.
        """
        for _ in range(int(WAIT_S)):
            self.send(key)
            while select.select([self._end], [], [], 1.0)[0]:
                if not self._read():
                    return self._ended()
        raise AssertionError(f"{key!r} did not end it; it shows {self._plain()!r}")

    def end(self) -> None:
        os.close(self._end)
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)
            self._ended()

    def _ended(self) -> int:
        self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code

    def rest(self) -> str:
        return self._plain()[self._seen :]

    def _plain(self) -> str:
        """What is shown, without what moves the cursor and colours."""
        return re.sub(r"\x1b(\[[0-9;?>=]*[a-zA-Z]|[=>]|\][^\x07]*\x07|\(B)", "", self.shown)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._end], [], [], WAIT_S)
        assert ready, f"nothing came for {WAIT_S} s; it shows {self._plain()!r}"
        try:
            data = os.read(self._end, 4096)
        except OSError:  # its last process has ended
            return False
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


@contextmanager
def in_terminal(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[Terminal]:
    """Run a program in a terminal of its own; both go at the end."""
    pid, end = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore Ctrl+C
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.chdir(folder)
        os.execvpe(command[0], list(command), {**environment})
    termios.tcsetwinsize(end, (24, 400))
    terminal = Terminal(pid, end)
    try:
        yield terminal
    finally:
        terminal.end()


def path_with_program(folder: Path) -> str:
    """A PATH on which `loco-peer` is this checkout's."""
    program = folder / "bin" / "loco-peer"
    program.parent.mkdir()
    root = Path(__file__).resolve().parents[3]
    program.write_text(
        f"#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} -c"
        " 'from peer.cli import main; main()' \"$@\"\n"
    )
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"
