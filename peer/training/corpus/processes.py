"""Processes that work for whoever makes a corpus, and end with it.

Rules:
    1. Each has a session of its own: Ctrl+C in a terminal is for the daemon, which ends them.
    2. Their input stays open while we live. Its first line is the order; its end, which comes
       however we die, ends them.
    3. They say how far they are in lines of JSON. One that fails says why, and exits with 1.
    4. The first failure ends all of them at once, and so does a caller that is cancelled.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final, Self

from .checks import Check
from .packed import InvalidCorpus

POLL_S: Final = 0.1
"""Between two looks at whether the caller is cancelled."""
_READ_BYTES: Final = 65536
_KILLED: Final = -signal.SIGKILL
Heard = Callable[[dict[str, Any]], None]
"""Takes what a process says of its work."""


def run_processes(module: str, orders: Sequence[object], heard: Heard, check: Check) -> None:
    """Run a process of a module for each order, all to their ends.

    Raises:
        InvalidCorpus: one failed, and said why.
        OSError: one could not write, or could not be started.
    """
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        # All are started before one is told anything: they import at the same time.
        processes = [stack.enter_context(_Process(module)) for _ in orders]
        for process, order in zip(processes, orders, strict=True):
            process.begin(order)
            selector.register(process, selectors.EVENT_READ, process)
        while selector.get_map():
            check()
            for key, _ in selector.select(POLL_S):
                if not key.data.hear(heard):
                    selector.unregister(key.fileobj)


class _Process:
    """One of them; leaving the context ends it."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._begun_line = b""
        self._last: dict[str, Any] = {}
        self._at = "nothing yet"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()
        with suppress(BrokenPipeError):  # it ended before it took its order
            self._input.close()

    def fileno(self) -> int:
        """The descriptor of what it says, for selectors."""
        return self._output.fileno()

    def begin(self, order: object) -> None:
        """Tell it what to do."""
        with suppress(BrokenPipeError):  # how it ended is told when its output ends
            self._input.write(json.dumps(order).encode() + b"\n")
            self._input.flush()

    def hear(self, heard: Heard) -> bool:
        """Take what it has said; False when it has done its work. Raises InvalidCorpus, OSError."""
        data = os.read(self.fileno(), _READ_BYTES)
        if not data:
            self._check_end(self._process.wait())
            return False
        *lines, self._begun_line = (self._begun_line + data).split(b"\n")
        for line in lines:
            self._last = json.loads(line)
            self._at = self._last.get("at", self._at)
            heard(self._last)
        return True

    def _check_end(self, status: int) -> None:
        if not status:
            return
        if "errno" in self._last:
            number = self._last["errno"]
            raise OSError(number, os.strerror(number), self._last["path"])
        if "error" in self._last:
            raise InvalidCorpus(self._last["error"])
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        why = ", perhaps for want of memory" if status == _KILLED else ""
        raise InvalidCorpus(
            f"a process that tokenised {how}{why}; it was at {self._at}. Start again: shards that"
            " were done are kept"
        )
