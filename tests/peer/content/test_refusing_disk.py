"""A disk that is full, read-only or broken: nobody else is blamed, and nothing comes twice."""

import errno
from pathlib import Path

import numpy as np
import pytest
import trio
from corpus_worlds import PeerOfWorld, world
from trio.testing import MockClock

from peer.content.pieces import DISK_PAUSE_S
from peer.observe.event_names import EventName
from peer.training.corpus.blocks import piece_path
from protocol.limits import MAX_ASKED

pytestmark = pytest.mark.slow

FULL = "No space left on device"


class Disk:
    """A disk that refuses what one method of the store asks of it, until it is mended."""

    def __init__(self, peer: PeerOfWorld, method: str) -> None:
        self.refuses = True
        self._obeys = getattr(peer.store, method)
        setattr(peer.store, method, self._asked)

    def _asked(self, *args: object) -> None:
        if self.refuses:
            raise OSError(errno.ENOSPC, FULL)
        self._obeys(*args)


async def test_what_a_full_disk_does_not_take_waits_for_it_and_comes_once(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, trio.open_nursery() as nursery:
        await made.add("founder", whole=True)
        joiner = await made.add("joiner")
        disk = Disk(joiner, "add")
        joiner.fetcher.plan(made.members(), 0, 0)
        nursery.start_soon(joiner.fetcher.bring, (0, 1))
        await trio.sleep(20 * DISK_PAUSE_S)
        piece_bytes = made.kept.manifest.piece_bytes(0)
        assert joiner.num_here() == 0
        assert joiner.came_bytes() < (MAX_ASKED + 1) * piece_bytes
        (event,) = joiner.events(EventName.DISK_REFUSED)
        assert event["detail"] == FULL
        assert not joiner.events(EventName.PIECE_FAILED)
        assert FULL in joiner.facts.doing
        disk.refuses = False
        await trio.sleep(2 * DISK_PAUSE_S)
        assert joiner.num_here() > MAX_ASKED
        assert {0, 1} <= set(np.flatnonzero(joiner.store.here).tolist())
        assert joiner.came_bytes() < (joiner.num_here() + 4) * piece_bytes
        assert made.peers["founder"].network.peer_id in joiner.fetcher._versions
        nursery.cancel_scope.cancel()


@pytest.mark.long
async def test_a_disk_that_removes_nothing_takes_no_more_than_it_may(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, trio.open_nursery() as nursery:
        await made.add("founder", whole=True)
        joiner = await made.add("joiner", max_pieces=26)
        joiner.fetcher.plan(made.members(), 0, 0)
        await trio.sleep(60)
        assert joiner.num_here() == 26
        disk, new = Disk(joiner, "drop"), np.flatnonzero(~joiner.store.here)[:3].tolist()
        nursery.start_soon(joiner.fetcher.bring, new)
        await trio.sleep(10 * DISK_PAUSE_S)
        assert 26 < joiner.num_here() <= 26 + MAX_ASKED
        assert len(joiner.events(EventName.DISK_REFUSED)) == 1
        disk.refuses = False
        await trio.sleep(2 * DISK_PAUSE_S)
        assert joiner.num_here() == 26
        assert joiner.store.here[new].all()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("removes", [True, False])
async def test_a_piece_that_cannot_be_read_is_not_here_and_comes_again(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removes: bool
) -> None:
    async with world(tmp_path) as made:
        await made.add("founder", whole=True)
        joiner = await made.add("joiner")
        joiner.fetcher.plan(made.members(), 0, 0)
        await joiner.fetcher.bring((3,))
        path, broken = piece_path(tmp_path / "joiner", 3), "read_bytes"
        good = path.read_bytes()
        if not removes:
            path.write_bytes(b"?")
            broken = "unlink"

        def refused(self: Path, **_: object) -> bytes:
            raise OSError(errno.EIO, f"Input/output error: {self}")

        with monkeypatch.context() as broken_disk:
            broken_disk.setattr(Path, broken, refused)
            assert joiner.store.read(3) is None
            assert not joiner.store.here[3]
            with trio.fail_after(60):
                await joiner.fetcher.bring((3,))
        assert path.read_bytes() == good
