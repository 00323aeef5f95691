"""The first signal asks, the second ends."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import trio

from peer.options.exit_codes import ExitCode
from peer.process.signals import run_until_signalled


def send(number: int) -> None:
    os.kill(os.getpid(), number)


class Job:
    """Ends gracefully when asked to, if it is of that kind."""

    def __init__(self, *, obeys: bool = True) -> None:
        self.asked = trio.Event()
        self.cancelled = False
        self._obeys = obeys

    async def run(self) -> ExitCode:
        try:
            await self.asked.wait()
            if not self._obeys:
                await trio.sleep_forever()
        except trio.Cancelled:
            self.cancelled = True
            raise
        return ExitCode.OK


async def test_a_job_that_ends_by_itself_says_how() -> None:
    async def refused() -> ExitCode:
        return ExitCode.REFUSED

    assert await run_until_signalled(refused, trio.Event(), grace_s=1) is ExitCode.REFUSED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_signal_asks_for_a_graceful_end(nursery, number: int) -> None:
    job = Job()
    nursery.start_soon(_later, send, number)
    assert await run_until_signalled(job.run, job.asked, grace_s=60) is ExitCode.OK
    assert (job.asked.is_set(), job.cancelled) == (True, False)


async def _later(act, *args) -> None:
    await trio.testing.wait_all_tasks_blocked()
    act(*args)


async def test_a_signal_to_who_is_leaving_already_asks_for_the_same(nursery) -> None:
    job, signalled = Job(obeys=False), trio.Event()

    async def leaves_slowly() -> ExitCode:
        await signalled.wait()
        return ExitCode.OK

    async def told_twice() -> None:
        job.asked.set()
        await _later(send, signal.SIGTERM)
        await _later(signalled.set)

    nursery.start_soon(told_twice)
    assert await run_until_signalled(leaves_slowly, job.asked, grace_s=60) is ExitCode.OK


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)],
)
async def test_the_second_signal_ends_at_once(nursery, number: int, code: ExitCode) -> None:
    job = Job(obeys=False)

    async def twice() -> None:
        await _later(send, signal.SIGTERM)
        await job.asked.wait()
        await _later(send, number)

    nursery.start_soon(twice)
    assert await run_until_signalled(job.run, job.asked, grace_s=60) is code
    assert job.cancelled


async def test_the_second_signal_has_the_last_word(nursery) -> None:
    asked = trio.Event()

    async def ends_well_when_cut_off() -> ExitCode:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            return ExitCode.OK
        return ExitCode.FAILURE

    async def twice() -> None:
        await _later(send, signal.SIGTERM)
        await asked.wait()
        await _later(send, signal.SIGTERM)

    nursery.start_soon(twice)
    code = await run_until_signalled(ends_well_when_cut_off, asked, grace_s=60)
    assert code is ExitCode.TERMINATED


@pytest.mark.parametrize("asks", [partial(send, signal.SIGTERM), None])
async def test_when_the_grace_is_over_it_is_a_failure(nursery, autojump_clock, asks) -> None:
    job, late = Job(obeys=False), []
    nursery.start_soon(_later, asks or job.asked.set)  # a signal, or a command, or the run's end
    before = trio.current_time()
    code = await run_until_signalled(
        job.run, job.asked, grace_s=8, say_late=lambda: late.append("late")
    )
    assert (code, late) == (ExitCode.FAILURE, ["late"])
    assert trio.current_time() - before == pytest.approx(8)
    assert job.cancelled


async def test_errors_of_the_job_come_through() -> None:
    async def broken() -> ExitCode:
        raise RuntimeError("bug")

    with pytest.RaisesGroup(RuntimeError):
        await run_until_signalled(broken, trio.Event(), grace_s=1)


STUCK = """
import functools, threading, trio
import peer.process.signals as signals
signals.HARD_EXIT_S = 0.05

async def stuck():
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()

async def main():
    stop = trio.Event()
    trio.lowlevel.spawn_system_task(say, stop)
    return await signals.run_until_signalled(stuck, stop, grace_s=60)

async def say(stop):
    print("ready", flush=True)
    await stop.wait()
    print("asked", flush=True)

raise SystemExit(trio.run(main))
"""


@pytest.mark.slow
def test_a_stuck_job_does_not_hold_the_terminal() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == b"asked\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == ExitCode.INTERRUPTED
