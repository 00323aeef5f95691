"""How much of its time a peer validates for, where each round wants to."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from peer.facts import Facts
from peer.observe.events import EventLog
from peer.rounds.validation import FIRST_VALIDATIONS, Validation
from peer.training.messages import Evaluated


async def test_a_tenth_of_the_time_first_and_a_fiftieth_later(autojump_clock: MockClock) -> None:
    events = EventLog(lambda _: None, peer="me", wall_time_s=lambda: 0.0, stream=None)
    services: Any = SimpleNamespace(facts=Facts("me", 1), events=events)
    validation, line = Validation(1, services), SimpleNamespace(send=_sent)
    begun_s = []
    for round_ in range(FIRST_VALIDATIONS + 5):
        while not validation.is_due(round_):
            await trio.sleep(0.5)
        begun_s.append(trio.current_time())
        await validation.begin(line, round_)  # type: ignore[arg-type]
        await trio.sleep(1.0)
        validation.ended(Evaluated(round_, 1.0, 1.0))
    apart_s = [later - sooner for sooner, later in pairwise(begun_s)]
    assert apart_s == pytest.approx([11.0] * FIRST_VALIDATIONS + [51.0] * 4)


async def _sent(_: object) -> None:
    await trio.lowlevel.checkpoint()
