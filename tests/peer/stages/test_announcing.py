"""What a data peer announces is said until a relay has noted it, or a later one is announced."""

from collections.abc import Iterable
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from peer.stages.exchange import TICK_S, StageExchange
from protocol.microbatch.data_peer import DataPeerCore
from protocol.pipeline.problem import NO_SWAPS
from protocol.routing.routers import RandomRouter
from protocol.wire.stage_messages import Announcement, Noted

MISSED = 3


class Deaf:
    """Transfers to a relay that misses the first few announcements."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.deaf_for = MISSED

    async def ask(self, _relay: str, question: Any) -> Noted | None:
        await trio.lowlevel.checkpoint()
        self.asked.append(question.iteration)
        return None if len(self.asked) <= self.deaf_for else Noted(7)


@pytest.fixture
def core() -> DataPeerCore:
    core = DataPeerCore("data", RandomRouter("data", 0, 2, NO_SWAPS), 30.0)
    core.announced = 4
    return core


async def announce(
    core: DataPeerCore, transfers: Any, stages: Iterable[int | None], times: int = 1
) -> None:
    of_each_look = iter(stages)
    company = SimpleNamespace(stage_of=lambda _: next(of_each_look))
    exchange: Any = SimpleNamespace(
        _core=core, _company=company, _transfers=transfers, _saying=set(), _do=lambda _: None
    )
    async with trio.open_nursery() as nursery:
        for _ in range(times):
            nursery.start_soon(StageExchange._tell, exchange, "relay", Announcement(4))


async def test_it_is_said_again_until_it_is_noted(core, autojump_clock):
    transfers = Deaf()
    await announce(core, transfers, repeat(1))
    assert transfers.asked == [4] * (MISSED + 1)
    assert trio.current_time() == pytest.approx(MISSED * TICK_S)


async def test_a_relay_that_comes_and_goes_is_told_once_at_a_time(core, autojump_clock):
    transfers = Deaf()
    await announce(core, transfers, repeat(1), times=3)
    assert transfers.asked == [4] * (MISSED + 1)


@pytest.mark.parametrize(("stage", "said"), [(1, [4, 4]), (None, [])])
async def test_it_is_not_said_any_more_when_a_later_one_is(core, stage, said, autojump_clock):
    transfers = Deaf()
    transfers.deaf_for = 10**6
    async with trio.open_nursery() as nursery:
        nursery.start_soon(announce, core, transfers, repeat(stage))
        await trio.sleep(1.2 * TICK_S)
        core.announced = 5
    assert transfers.asked == said


async def test_a_relay_whose_link_is_back_soon_is_told(core, autojump_clock):
    transfers = Deaf()
    transfers.deaf_for = 0
    await announce(core, transfers, [None, None, 1])
    assert transfers.asked == [4]
    assert trio.current_time() == pytest.approx(2 * TICK_S)
