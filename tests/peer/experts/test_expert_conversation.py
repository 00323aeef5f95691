"""Texts that others have scored: one after another, in a small part of the trainer's time."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
import trio.testing

from peer.experts.conversation import ExpertService, ask_expert, score_of
from peer.network.conversation import Conversation
from peer.rounds.domains import ToldLogProbs
from peer.rounds.validation import MAX_VALIDATION_SHARE
from protocol.errors import Refused
from protocol.outcomes import RefusalReason
from simulation.network import SimulatedInternet
from simulation.swarm import identity_of

GROUP = "ab" * 16
TEXT = np.arange(5, dtype=np.uint32)


class Trainer:
    """Scores a text in so many seconds; one that is dead cannot."""

    def __init__(self, lasts_s: float, *, dead: bool = False, trains: bool = True) -> None:
        self.lasts_s, self.dead, self.trains = lasts_s, dead, trains
        self.began_s = list[float]()

    async def score(self, tokens: npt.NDArray[Any]) -> ToldLogProbs | None:
        self.began_s.append(trio.current_time())
        await trio.sleep(self.lasts_s)
        if self.dead:
            return None
        return ToldLogProbs("cd" * 16, 7, np.full(len(tokens) - 1, -1.5, np.float32))


@asynccontextmanager
async def talk_with(trainer: Trainer) -> AsyncIterator[Conversation]:
    internet, asked = SimulatedInternet(1), identity_of(1, "asked").peer_id
    async with (
        internet.open_network(asked) as server,
        internet.open_network(identity_of(1, "asker").peer_id) as client,
    ):
        await ExpertService(
            server, GROUP, {}, trainer.score, 8, 256, lambda: trainer.trains
        ).start()
        await client.connect(asked, server.addresses)
        async with await ask_expert(client, asked) as talk:
            yield talk


async def test_texts_take_a_small_part_of_the_trainers_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    trainer = Trainer(0.1)
    async with talk_with(trainer) as talk:
        for _ in range(4):
            told = await score_of(talk, GROUP, TEXT)
            assert (told.stamp, told.step, told.loss) == ("cd" * 16, 7, 1.5)
    apart_s = [after - before for before, after in pairwise(trainer.began_s)]
    assert apart_s == pytest.approx([0.1 + 0.1 / MAX_VALIDATION_SHARE] * 3)


async def test_once_the_run_is_over_texts_take_the_time_that_they_need(
    autojump_clock: trio.testing.MockClock,
) -> None:
    trainer = Trainer(5.0, trains=False)
    async with talk_with(trainer) as talk:
        for _ in range(3):
            await score_of(talk, GROUP, TEXT)
    apart_s = [after - before for before, after in pairwise(trainer.began_s)]
    assert apart_s == pytest.approx([5.0, 5.0], abs=0.1)


async def test_who_would_wait_long_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    trainer = Trainer(5.0)
    async with talk_with(trainer) as talk:
        await score_of(talk, GROUP, TEXT)
        with pytest.raises(Refused) as refused:
            await score_of(talk, GROUP, TEXT)
    assert refused.value.reason is RefusalReason.TOO_MANY
    assert len(trainer.began_s) == 1


async def test_a_text_that_is_being_scored_holds_up_no_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    trainer = Trainer(1000.0)
    with trio.move_on_after(60):
        async with talk_with(trainer) as talk:
            await score_of(talk, GROUP, TEXT)
    assert trainer.began_s
    assert trio.current_time() < 100


async def test_who_waits_for_its_turn_is_answered_however_long_the_text_takes_then(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with talk_with(Trainer(100.0)) as talk:
        assert (await score_of(talk, GROUP, TEXT)).step == 7


async def test_a_peer_without_a_trainer_says_so(autojump_clock: trio.testing.MockClock) -> None:
    async with talk_with(Trainer(0.1, dead=True)) as talk:
        with pytest.raises(Refused, match="no trainer of mine can tell now"):
            await score_of(talk, GROUP, TEXT)
