"""SIGINT and SIGTERM: the first asks for a graceful end, the second ends at once.

first signal     `request_stop()`; the job has `grace_s` to return by itself
grace is over    the job is cancelled; the exit code is FAILURE
second signal    the job is cancelled; the exit code is 130 or 143
still there      after `HARD_EXIT_S` more, `os._exit`: shielded clean-up or a stuck thread must not
                 hold a terminal (children watch their parent, and go by themselves)
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
    """What the signals have decided; None while they have not."""

    def __init__(self) -> None:
        self.code: ExitCode | None = None


async def run_until_signalled(
    job: Callable[[], Awaitable[ExitCode]],
    request_stop: Callable[[], None],
    *,
    grace_s: float,
) -> ExitCode:
    """Run `job` to its end, or as far as signals allow. Only from the main thread.

    Args:
        job: the daemon's work; returns how it ended.
        request_stop: called once, at the first signal; must make `job` return soon.
        grace_s: time for that.
    """
    ending = _Ending()
    code: ExitCode | None = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(_watch, signals, request_stop, grace_s, scope, ending)
            with scope:
                code = await job()
            nursery.cancel_scope.cancel()
    at_once = ending.code in _CODES.values()
    return code if code is not None and not at_once else ending.code or ExitCode.FAILURE


async def _watch(
    signals: AsyncIterator[int],
    request_stop: Callable[[], None],
    grace_s: float,
    job: trio.CancelScope,
    ending: _Ending,
) -> None:
    await anext(signals)
    request_stop()
    ending.code = ExitCode.FAILURE
    with trio.move_on_after(grace_s):
        ending.code = _CODES[signal.Signals(await anext(signals))]
    job.cancel()
    await trio.sleep(HARD_EXIT_S)
    os._exit(ending.code)
