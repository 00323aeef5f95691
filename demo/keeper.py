"""One process that outlives nobody: it runs a command, and ends it when its starter is gone.

    demo --- pipe on our standard input ---> keeper ---> loco-peer ---> p2pd, trainer

The demo holds the other end of our standard input and never writes to it. However the demo ends
(normally, by a signal, by kill -9), the kernel closes that end, and we read the end of input.
Then, and when the command ends by itself:

    1. The command is asked to end (SIGTERM), and killed after GRACE_S.
    2. Everything it has started is killed. On Linux we adopt orphans (PR_SET_CHILD_SUBREAPER), so
       whatever left its parent or its session is still found among our descendants.

We run in a session of our own: a signal to the demo's terminal or process group is not for us.
Should we ourselves be killed, the command gets a SIGTERM from the kernel (PR_SET_PDEATHSIG; Linux).

    python keeper.py COMMAND [ARGUMENT ...]
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from typing import Final

import psutil

GRACE_S: Final = 6.0
"""Time from SIGTERM to SIGKILL."""
POLL_S: Final = 0.1
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def keep(command: list[str]) -> int:
    """Run `command` until it ends or our standard input does. Returns its exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _process_control(_PR_SET_CHILD_SUBREAPER, 1)
    # The keeper has one thread, so running Python between fork and exec is safe.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_in_the_child)  # noqa: PLW1509
    try:
        while child.poll() is None and not _input_ended(POLL_S):
            pass
        return _end(child)
    finally:
        _kill_descendants()


def _in_the_child() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _process_control(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _process_control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _input_ended(timeout_s: float) -> bool:
    readable, _, _ = select.select([0], [], [], timeout_s)
    return bool(readable) and not os.read(0, 4096)


def _end(child: "subprocess.Popen[bytes]") -> int:
    if child.poll() is None:
        child.terminate()
    try:
        return child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _kill_descendants() -> None:
    """Kill until nobody is left: one who was just forked may have escaped the last look."""
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in descendants:
            with contextlib.suppress(ChildProcessError):  # its own parent collects it
                os.waitpid(process.pid, 0)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
