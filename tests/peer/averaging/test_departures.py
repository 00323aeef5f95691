"""Fragments that were sent together leave in that order, and nobody waits for long."""

import pytest
import trio

from peer.averaging.diloco.departures import WAIT_S, Departures


@pytest.mark.parametrize("arriving", [(0, 1, 2), (2, 1, 0)])
async def test_they_leave_in_the_order_in_which_they_were_sent(arriving, autojump_clock):
    departures, left = Departures(), []

    async def leave(fragment: int) -> None:
        await departures.turn(fragment)
        await trio.sleep(0.1)
        left.append(fragment)
        departures.left(fragment)

    for fragment in (1, 0, 2):
        departures.sent(fragment)
    async with trio.open_nursery() as nursery:
        for fragment in arriving:
            nursery.start_soon(leave, fragment)
    assert left == [1, 0, 2]


async def test_who_does_not_come_is_waited_for_no_longer(autojump_clock):
    departures, began_s = Departures(), trio.current_time()
    departures.sent(0)
    departures.sent(1)
    await departures.turn(1)
    assert trio.current_time() - began_s == pytest.approx(WAIT_S)


async def test_who_is_alone_or_unknown_does_not_wait(autojump_clock):
    departures = Departures()
    began_s = trio.current_time()
    await departures.turn(3)
    departures.sent(3)
    await departures.turn(3)
    departures.left(3)
    departures.left(3)
    assert trio.current_time() == began_s
