"""Pieces that training waits for, and that nobody has: that is told, until one has them."""

from pathlib import Path

import pytest
import trio
from corpus_worlds import world
from trio.testing import MockClock

from peer.content.pieces import UNHELD_S
from peer.observe.event_names import EventName

pytestmark = pytest.mark.slow


async def test_pieces_that_nobody_has_are_told_once_with_those_that_were_asked(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, trio.open_nursery() as nursery:
        other = await made.add("other")
        joiner = await made.add("joiner")
        joiner.facts.expert = "code"
        joiner.fetcher.plan(made.members(), 0, 0)
        nursery.start_soon(joiner.fetcher.bring, (0, 1))
        await trio.sleep(3 * UNHELD_S)
        (event,) = joiner.events(EventName.CORPUS_UNHELD)
        assert event["remotes"] == [other.network.peer_id]
        assert "has 2 pieces of the corpus of the expert 'code'" in event["detail"]
        assert joiner.facts.corpus.unheld == event["detail"]
        await made.add("founder", whole=True)
        await trio.sleep(UNHELD_S)
        assert joiner.store.here[[0, 1]].all()
        assert not joiner.facts.corpus.unheld
        nursery.cancel_scope.cancel()
