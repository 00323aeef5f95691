"""How a daemon ends in time: whoever asks for it, it has its grace, and a second signal ends it.

asked to end     by the first SIGINT or SIGTERM, by a command, or by itself: `stop` is set, and the
                 job has `grace_s` to return
grace is over    the job is cancelled; the exit code is FAILURE
second signal    the job is cancelled; the exit code is 130 or 143
still there      after `HARD_EXIT_S` more, `os._exit`: shielded clean-up or a stuck thread must not
                 hold a terminal (children watch their parent, and go by themselves)

SIGHUP is no such request: the terminal is gone, and the run goes on (terminal.py).
"""

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import trio

from peer.options.exit_codes import ExitCode

HARD_EXIT_S: Final = 2.0
_CODES: Final = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


class _Ending:
    """What was decided, None while nothing was; and how a job that has not ended is made to."""

    def __init__(self, job: trio.CancelScope) -> None:
        self.code: ExitCode | None = None
        self._job = job

    async def now(self, code: ExitCode) -> None:
        """Cancel the job; should that not help, end the process. Does not return."""
        self.code = code
        self._job.cancel()
        await trio.sleep(HARD_EXIT_S)
        os._exit(code)


async def run_until_signalled(
    job: Callable[[], Awaitable[ExitCode]],
    stop: trio.Event,
    *,
    grace_s: float,
    say_late: Callable[[], None] = lambda: None,
) -> ExitCode:
    """Run `job` to its end, or as far as signals and the grace allow. Only from the main thread.

    Args:
        job: the daemon's work; returns how it ended.
        stop: set by the first signal, or by whoever else wants an end; must make `job` return soon.
        grace_s: time for that.
        say_late: called when that was not enough.
    """
    code: ExitCode | None = None
    with trio.open_signal_receiver(*_CODES) as signals:
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            ending = _Ending(scope)
            nursery.start_soon(_heed, signals, stop, ending)
            nursery.start_soon(_bound, stop, grace_s, say_late, ending)
            with scope:
                code = await job()
            nursery.cancel_scope.cancel()
    at_once = ending.code in _CODES.values()
    return code if code is not None and not at_once else ending.code or ExitCode.FAILURE


async def _heed(signals: AsyncIterator[int], stop: trio.Event, ending: _Ending) -> None:
    await anext(signals)
    stop.set()
    await ending.now(_CODES[signal.Signals(await anext(signals))])


async def _bound(
    stop: trio.Event, grace_s: float, say_late: Callable[[], None], ending: _Ending
) -> None:
    await stop.wait()
    await trio.sleep(grace_s)
    say_late()
    await ending.now(ExitCode.FAILURE)
