"""Pieces of a corpus come from peers before they are trained on, and outlive their source."""

from pathlib import Path

import numpy as np
import pytest
import trio
from corpus_worlds import FIRST_BLOCKS, NUM_PIECES, PeerOfWorld, World, world
from msgspec import structs
from trio.testing import MockClock

from peer.content.fetching import fetch_from
from peer.network.conversation import Conversation
from peer.training.corpus.blocks import PieceCorpus, piece_path
from protocol.content.needs import CorpusNeeds
from protocol.errors import Refused
from protocol.limits import MAX_READER_REQUESTS, READERS
from protocol.wire.content_messages import GetHoldings, Holdings
from protocol.wire.versions import CONTENT

pytestmark = pytest.mark.slow


def plan_all(made: World, position: int = 0) -> None:
    for peer in made.peers.values():
        peer.fetcher.plan(made.members(), 0, position)


async def until_calm(made: World) -> None:
    """Until nothing has come for a while."""
    before = -1
    while before != (now := sum(peer.facts.corpus.fetched_bytes for peer in made.peers.values())):
        before = now
        await trio.sleep(60)


def first_pieces(made: World, peer: PeerOfWorld) -> tuple[int, ...]:
    needs = CorpusNeeds(made.plan, 0, 0, peer.network.peer_id, made.members(), FIRST_BLOCKS)
    return needs.first


async def test_a_joiner_has_the_pieces_of_its_first_blocks(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made:
        await made.add("founder", whole=True)
        joiner = await made.add("joiner")
        plan_all(made)
        with trio.fail_after(30):
            await joiner.fetcher.bring(first_pieces(made, joiner)[:2])
        assert 2 <= joiner.num_here() < NUM_PIECES
        corpus = PieceCorpus(tmp_path / "joiner", made.kept.manifest, np.zeros((1, 65)))
        blocks = made.plan.take(0, 0, 2, joiner.network.peer_id, made.members()).blocks
        assert corpus.missing(blocks) == ()
        assert np.array_equal(corpus.blocks(blocks), made.kept.open().blocks(blocks))


async def test_the_corpus_outlives_its_founder(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        founder = await made.add("founder", whole=True)
        for name in ("a", "b", "c", "d"):
            await made.add(name)
        plan_all(made)
        await until_calm(made)
        assert founder.facts.corpus.only_here == 0
        copies = sum(p.store.here.astype(int) for p in made.peers.values() if p is not founder)
        assert np.min(copies) >= 2  # of three keepers the founder may be one
        made.kill("founder")
        late = await made.add("late")
        plan_all(made)
        every = range(NUM_PIECES)
        with trio.fail_after(300):
            await late.fetcher.bring(every)
        assert late.num_here() == NUM_PIECES


async def test_a_source_that_dies_in_the_middle_holds_up_nobody(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made:
        await made.add("founder", whole=True)
        await made.add("other", whole=True)
        joiner = await made.add("joiner")
        plan_all(made)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(joiner.fetcher.bring, range(NUM_PIECES))
            while joiner.num_here() < 8:
                await trio.sleep(0.01)
            made.kill("founder")
            nursery.cancel_scope.deadline = trio.current_time() + 300
        assert joiner.num_here() == NUM_PIECES


async def test_a_disk_that_is_full_lets_go_of_what_is_needed_last(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made:
        await made.add("founder", whole=True)
        joiner = await made.add("joiner", max_pieces=26)
        plan_all(made)
        await until_calm(made)
        assert joiner.num_here() == 26
        here, needed = np.flatnonzero(joiner.store.here), first_pieces(made, joiner)
        assert set(needed) < set(here.tolist())
        others = [piece for piece in range(NUM_PIECES) if piece not in here][:3]
        await joiner.fetcher.bring(others)
        await until_calm(made)
        assert joiner.num_here() == 26
        assert {*needed, others[-1]} <= set(np.flatnonzero(joiner.store.here).tolist())
        assert not list((tmp_path / "joiner").glob(".*"))


async def test_a_piece_that_was_damaged_on_the_disk_comes_again(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made:
        await made.add("founder", whole=True)
        joiner = await made.add("joiner")
        plan_all(made)
        await joiner.fetcher.bring((3,))
        path = piece_path(tmp_path / "joiner", 3)
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with trio.fail_after(60):
            await joiner.fetcher.bring((3,))
        assert path.read_bytes() == good


async def test_a_liar_is_not_believed_and_the_others_are_asked(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made:
        await made.add("founder", whole=True)
        liar = await made.add("liar", whole=True)
        liar.store.read = lambda piece: bytes(made.kept.manifest.piece_bytes(piece))  # type: ignore[method-assign]
        joiner = await made.add("joiner")
        plan_all(made)
        with trio.fail_after(60):
            await joiner.fetcher.bring(range(8))
        founder_data = made.peers["founder"].store.read(5)
        assert piece_path(tmp_path / "joiner", 5).read_bytes() == founder_data


async def test_what_one_reader_may_cost_is_bounded(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made:
        founder = await made.add("founder", whole=True)
        joiner = await made.add("joiner")
        corpus, manifest = made.kept.manifest.name, made.kept.manifest
        async with fetch_from(joiner.network, founder.network.peer_id) as asker:
            version, pieces = await asker.holdings(manifest, 0)
            assert pieces is not None
            assert pieces.all()
            assert await asker.holdings(manifest, version) == (version, None)
            other = structs.replace(manifest, vocabulary_size=7)
            with pytest.raises(Refused, match="no corpus"):
                await asker.holdings(other, 0)
            with pytest.raises(Refused, match="no content of that name"):
                await asker.piece(other, 0)
        talk = Conversation(await joiner.network.open_stream(founder.network.peer_id, CONTENT))
        with pytest.raises(Refused, match="are enough"):
            for _ in range(MAX_READER_REQUESTS + 1):
                await talk.send(GetHoldings(corpus, 0))
                await talk.receive(Holdings)
        while joiner.num_here() < NUM_PIECES:  # what it fetches takes places too
            await trio.sleep(1)
        streams = [
            Conversation(await joiner.network.open_stream(founder.network.peer_id, CONTENT))
            for _ in range(READERS.per_peer + 1)
        ]
        await streams[-1].send(GetHoldings(corpus, 0))
        with pytest.raises(Refused, match="ask another"):
            await streams[-1].receive(Holdings)
        for stream in streams:
            await stream.aclose()
