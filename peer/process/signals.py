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


async def run_until_signalled(
    job: Callable[[], Awaitable[ExitCode]],
    stop: trio.Event,
    *,
    grace_s: float,
    say_late: Callable[[], None] = lambda: None,
) -> ExitCode:
    """Run `job` to its end, or as far as signals and the grace allow. Only from the main thread.

    Args:
        stop: set by the first signal, or another who wants an end; must make `job` return soon.
        grace_s: time for that.
        say_late: called when that was not enough.
    """
    code: ExitCode | None = None
    forced: ExitCode | None = None
    scope = trio.CancelScope()

    async def end_now(forced_code: ExitCode) -> None:
        nonlocal forced
        forced = forced_code
        scope.cancel()
        await trio.sleep(HARD_EXIT_S)
        os._exit(forced_code)

    async def heed(signals: AsyncIterator[int]) -> None:
        await anext(signals)
        stop.set()
        await end_now(_CODES[signal.Signals(await anext(signals))])

    async def bound() -> None:
        await stop.wait()
        await trio.sleep(grace_s)
        say_late()
        await end_now(ExitCode.FAILURE)

    with trio.open_signal_receiver(*_CODES) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(heed, signals)
            nursery.start_soon(bound)
            with scope:
                code = await job()
            nursery.cancel_scope.cancel()
    if code is not None and forced not in _CODES.values():
        return code
    return forced or ExitCode.FAILURE
