"""A bell wakes those that wait when it rings, and nobody else."""

import trio
import trio.testing

from peer.process.bell import Bell


async def test_all_that_wait_go_on_when_it_rings(autojump_clock):
    bell, woken = Bell(), []

    async def wait(name: str) -> None:
        await bell.wait()
        woken.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "a")
        nursery.start_soon(wait, "b")
        await trio.testing.wait_all_tasks_blocked()
        assert woken == []
        assert "2 waiting" in repr(bell)
        bell.ring()
    assert sorted(woken) == ["a", "b"]


async def test_what_rang_before_wakes_nobody(autojump_clock):
    bell = Bell()
    bell.ring()
    with trio.move_on_after(1.0) as patience:
        await bell.wait()
    assert patience.cancelled_caught


async def test_it_rings_again_for_those_that_wait_again(autojump_clock):
    bell, rung_s = Bell(), []

    async def ring() -> None:
        for _ in range(3):
            await trio.sleep(1.0)
            bell.ring()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ring)
        for _ in range(3):
            await bell.wait()
            rung_s.append(trio.current_time())
    assert rung_s == [1.0, 2.0, 3.0]


async def test_who_gave_up_waiting_is_not_missed(autojump_clock):
    bell = Bell()
    with trio.move_on_after(1.0):
        await bell.wait()
    bell.ring()
    assert "0 waiting" in repr(bell)
