"""What a data peer announces is said until a relay has noted it, or a later one is announced."""

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from peer.stages.messenger import PAUSE_S, Messenger
from protocol.microbatch.commands import Announce
from protocol.microbatch.data_peer import DataPeerCore
from protocol.pipeline.problem import NO_SWAPS
from protocol.routing.random_paths import RandomRouter
from protocol.wire.messages import Noted

MISSED = 3


class Deaf:
    """Transfers to a relay that misses the first few announcements."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.deaf_for = MISSED

    async def ask(self, _relay: str, question: Any, _answer: Any) -> Noted | None:
        await trio.lowlevel.checkpoint()
        self.asked.append(question.iteration)
        return None if len(self.asked) <= self.deaf_for else Noted(7)


@pytest.fixture
def core() -> DataPeerCore:
    core = DataPeerCore("data", RandomRouter("data", 0, 2, NO_SWAPS), 30.0)
    core.announced = 4
    return core


async def announce(core: DataPeerCore, transfers: Any, group: str | None = "ab" * 16) -> None:
    company: Any = SimpleNamespace(group_of=lambda _: group)
    messenger = Messenger(core, company, transfers, lambda _: None)
    (job,) = messenger.jobs(Announce(4, ("relay",)))
    await job()


async def test_it_is_said_again_until_it_is_noted(core, autojump_clock):
    transfers = Deaf()
    await announce(core, transfers)
    assert transfers.asked == [4] * (MISSED + 1)
    assert trio.current_time() == pytest.approx(MISSED * PAUSE_S)


async def test_it_is_not_said_any_more_when_a_later_one_is(core, autojump_clock):
    transfers = Deaf()
    transfers.deaf_for = 10**6
    async with trio.open_nursery() as nursery:
        nursery.start_soon(announce, core, transfers)
        await trio.sleep(1.2 * PAUSE_S)
        core.announced = 5
    assert transfers.asked == [4, 4]


async def test_a_relay_that_is_gone_is_told_nothing(core, autojump_clock):
    transfers = Deaf()
    await announce(core, transfers, None)
    assert transfers.asked == []
