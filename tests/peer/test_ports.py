"""One suite for real and simulated Work."""

import subprocess
import sys
import threading

import pytest
import trio

from peer.runtime import Work
from peer.runtime.work import RealWork
from simulation.work import SimulatedWork


@pytest.fixture(params=[RealWork, SimulatedWork])
def work(request: pytest.FixtureRequest) -> Work:
    return request.param()


async def test_work_returns_and_raises(work: Work) -> None:
    assert await work.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await work.run(divmod, 1, 0)


async def test_work_does_not_block_the_loop(work: Work) -> None:
    order: list[str] = []

    async def other() -> None:
        order.append("other")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await work.run(lambda: None)
        order.append("work")
    assert order == ["other", "work"]


async def test_work_that_nobody_cancels_goes_on(work: Work) -> None:
    await work.run(work.check_cancelled)


async def test_work_under_way_can_be_cancelled() -> None:
    work, begun = RealWork(), threading.Event()

    def endless() -> None:
        begun.set()
        while True:
            work.check_cancelled()

    with trio.fail_after(60), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work.run, endless)
            await trio.to_thread.run_sync(begun.wait)
            scope.cancel()
    assert scope.cancelled_caught


async def test_simulated_work_takes_virtual_time(autojump_clock: trio.testing.MockClock) -> None:
    before = trio.current_time()
    await SimulatedWork(duration_s=5).run(lambda: None)
    assert trio.current_time() - before == pytest.approx(5)


def test_processor_time_is_that_of_this_process_and_of_another_while_it_is_there() -> None:
    real = RealWork()

    def others_s(pid: int) -> float:
        """The smaller one first: time passes between the two."""
        own_s = real.processor_time(None).taken_s
        return real.processor_time(pid).taken_s - own_s

    before = real.processor_time(None)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            while others_s(busy.pid) < 0.05:
                pass
        finally:
            busy.kill()
    assert others_s(busy.pid) < 0.05, "it has gone"
    now = real.processor_time(None)
    assert now.taken_s > before.taken_s
    assert now.idle_s >= before.idle_s
    assert SimulatedWork().processor_time(None) == (0.0, 0.0)
