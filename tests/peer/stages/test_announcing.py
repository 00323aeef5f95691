"""What a data peer announces is said until a relay has noted it, or a later one is announced."""

from collections.abc import Iterable
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from peer.stages.exchange import StageExchange
from protocol.microbatch.core import SendNotice
from protocol.microbatch.data_peer import DataPeerCore
from protocol.pipeline.problem import PathRules
from protocol.routing.routers import RandomRouter
from protocol.wire.stage_messages import Announcement, Noted


def announcements(commands) -> list[tuple[tuple[str, ...], int]]:
    return [
        (each.to, each.message.iteration)
        for each in commands
        if isinstance(each, SendNotice) and isinstance(each.message, Announcement)
    ]


@pytest.fixture
def core() -> DataPeerCore:
    """It has announced its first iteration to two relays."""
    core = DataPeerCore("data", RandomRouter("data", 0, 2, PathRules()), 30.0)
    core.peers_changed((("a", "b"),), 0.0, trained=True)
    assert announcements(core.begun(1, 0.0)) == [(("a", "b"), 1)]
    return core


def test_it_is_said_again_until_it_is_noted(core):
    assert announcements(core.ticked(0.5)) == [(("a", "b"), 1)]
    core.noted("a", Announcement(1), Noted(1))
    assert announcements(core.ticked(1.0)) == [(("b",), 1)]
    core.noted("b", Announcement(1), Noted(1))
    assert announcements(core.ticked(1.5)) == []


def test_it_is_not_said_any_more_when_a_later_one_is(core):
    core.restarted(4)
    assert announcements(core.ticked(0.5)) == [(("a", "b"), 2)]
    core.noted("a", Announcement(1), Noted(1))  # an answer to the first comes late
    assert announcements(core.ticked(1.0)) == [(("a", "b"), 2)]


def test_a_relay_whose_link_is_back_soon_is_told(core):
    for relay in "ab":
        core.noted(relay, Announcement(1), Noted(1))
    core.peers_changed((("a",),), 0.5, trained=True)
    assert announcements(core.peers_changed((("a", "b"),), 1.0, trained=True)) == [(("b",), 1)]
    assert announcements(core.ticked(1.5)) == [(("b",), 1)]


class Sender:
    """Sends to a relay that answers late."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def ask(self, _relay: str, question: Any) -> Noted | None:
        self.asked.append(question.iteration)
        await trio.sleep(1.0)
        return Noted(7)


async def tell(sender: Any, stages: Iterable[int | None], times: int) -> None:
    of_each_look = iter(stages)
    exchange: Any = SimpleNamespace(
        _core=SimpleNamespace(noted=lambda *_: []),
        _do=lambda _: None,
        _peers=SimpleNamespace(stage_of=lambda _: next(of_each_look)),
        _boundary_sender=sender,
        _being_sent=set(),
    )
    async with trio.open_nursery() as nursery:
        for _ in range(times):
            nursery.start_soon(StageExchange._send_notice, exchange, "relay", Announcement(4))


@pytest.mark.parametrize(("stage", "said"), [(1, [4]), (None, [])])
async def test_one_thing_is_said_once_at_a_time_and_to_those_who_are_there(
    stage, said, autojump_clock
):
    sender = Sender()
    await tell(sender, repeat(stage), times=3)
    assert sender.asked == said
