"""Pieces over lines that carry far less than all that may be on its way at once."""

from pathlib import Path

import numpy as np
import pytest
import trio
from corpus_worlds import USUAL, World, world
from trio.testing import MockClock

from peer.content.fetching import fetch_from
from peer.content.service import TURN_S
from protocol.errors import Refused

pytestmark = pytest.mark.slow

PIECE_BYTES = 4 << 20
MEGABIT_BYTES_PER_S = 125e3
ALONE_S = PIECE_BYTES / MEGABIT_BYTES_PER_S
"""For one piece over 1 Mbit/s."""
SOURCES = [f"source-{number}" for number in range(4)]


async def begin(made: World, whole: list[str], joiners: list[str]) -> None:
    for name in whole:
        await made.add(name, whole=True)
    for name in joiners:
        await made.add(name)
    for peer in made.peers.values():
        peer.fetcher.plan(made.members(), 0, 0)


async def test_a_joiner_behind_a_thin_line_gets_one_piece_after_the_other(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path, USUAL, num_pieces=11) as made:
        made.share_line(SOURCES, ["joiner"], mbps=1)
        await begin(made, SOURCES, ["joiner"])
        joiner, began_s = made.peers["joiner"], trio.current_time()
        came_s = list[float]()
        while len(came_s) < 6:
            await trio.sleep(0.5)
            if joiner.num_here() > len(came_s):
                came_s.append(trio.current_time() - began_s)
        assert came_s[0] < 1.5 * ALONE_S
        assert came_s[-1] < 10 * ALONE_S  # 6 of them, and parts of those on their way
        whole_bytes = joiner.facts.corpus.fetched_bytes
        assert joiner.came_bytes() < whole_bytes + 8 * PIECE_BYTES
        async with trio.open_nursery() as nursery:
            nursery.start_soon(joiner.fetcher.bring, range(made.kept.manifest.num_pieces))
            nursery.cancel_scope.deadline = trio.current_time() + 12 * ALONE_S
        assert joiner.num_here() == 12
        assert joiner.came_bytes() < 12.5 * PIECE_BYTES  # nothing came for nothing


@pytest.mark.long
async def test_a_founder_behind_a_thin_line_gives_one_piece_after_the_other(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    names = [f"joiner-{number}" for number in range(8)]
    async with world(tmp_path, USUAL, num_pieces=24) as made:
        made.share_line(["founder"], names, mbps=1)
        await begin(made, ["founder"], names)
        joiners, began_s = [made.peers[name] for name in names], trio.current_time()
        came_s = list[float]()
        while len(came_s) < 4:
            await trio.sleep(0.5)
            assert trio.current_time() - began_s < 8 * ALONE_S
            copies = sum(joiner.store.here.astype(int) for joiner in joiners)
            if np.count_nonzero(copies) > len(came_s):
                came_s.append(trio.current_time() - began_s)
        assert came_s[0] < 1.5 * ALONE_S
        came_bytes = sum(joiner.came_bytes() for joiner in joiners)
        kept_bytes = sum(joiner.facts.corpus.fetched_bytes for joiner in joiners)
        assert came_bytes < kept_bytes + 6 * PIECE_BYTES  # parts of those on their way


async def test_a_piece_comes_though_most_of_the_line_carries_something_else(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path, USUAL, num_pieces=1) as made:
        made.share_line(["founder"], ["joiner"], mbps=0.05)
        founder, joiner = await made.add("founder", whole=True), await made.add("joiner")
        manifest = made.kept.manifest
        async with fetch_from(joiner.network, founder.network.peer_id) as asker:
            assert await asker.piece(manifest, 0) == founder.store.read(0)


async def test_a_reader_whose_turn_does_not_come_is_told_in_time(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path, USUAL, num_pieces=2) as made:
        made.share_line(["founder"], ["a", "b"], mbps=1)
        for name in ("founder", "a", "b"):
            await made.add(name, whole=True)
        founder, one, other = (made.peers[name] for name in ("founder", "a", "b"))
        manifest = made.kept.manifest
        there = founder.network.peer_id
        async with (
            fetch_from(one.network, there) as first,
            fetch_from(other.network, there) as second,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(first.piece, manifest, 0)
            await trio.sleep(1)
            began_s = trio.current_time()
            with pytest.raises(Refused, match="my line is busy"):
                await second.piece(manifest, 1)
            assert trio.current_time() - began_s < TURN_S + 2
