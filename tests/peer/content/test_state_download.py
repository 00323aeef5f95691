"""A state that comes from two sources at once: what the second one may do, and may not."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from msgspec import structs
from service_worlds import GROUP, P, empty_vectors, world
from trio.testing import MockClock, wait_all_tasks_blocked

from peer.content.fetching import ContentClient, ExpectedState, StateDownload, own_digests
from peer.content.state_file import StateManifest, chunk_bytes, state_bytes
from protocol.content.manifest import digest_of
from protocol.errors import RemoteProtocolError, StreamLost
from protocol.limits import STATE_CHUNK_BYTES


class Liar(ContentClient):
    """A source whose chunks are not what it has named."""

    remote_peer_id = "liar"

    async def part(self, index: int, max_bytes: int, moved: Any) -> bytes:
        return b"?" + (await super().part(index, max_bytes, moved))[1:]


async def test_a_second_source_that_lies_costs_nothing_but_itself(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as honest, made.fetcher() as other:
        phi_P, delta_P = empty_vectors()
        download, liar = StateDownload(phi_P, delta_P), Liar(other.talk)
        with pytest.raises(RemoteProtocolError, match="chunks, expected"):
            await other.description(ExpectedState(GROUP), 2 * P)
        described = await honest.description(ExpectedState(GROUP), P)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(download.follow, honest, described)
            await wait_all_tasks_blocked()
            with pytest.raises(RemoteProtocolError, match="does not match its digest"):
                await download.help(liar, described)
        assert (phi_P == made.source.phi_P).all()
        assert (delta_P == made.source.delta_P).all()
        assert download.remotes == [honest.remote_peer_id]


class Infinite(ContentClient):
    """A source that has a state of its own, with a value that is no number."""

    remote_peer_id = "infinite"
    chunks = tuple(
        np.full(chunk_bytes(index, state_bytes(P)) // 4, np.nan, np.float32).tobytes()
        for index in range(4)
    )

    def of(self, described: StateManifest) -> StateManifest:
        digests = tuple(digest_of(chunk) for chunk in self.chunks)
        return replace(described, digests=(described.digests[0], *digests[1:]))

    async def request(self, content: str, parts: Sequence[int]) -> None:
        await trio.lowlevel.checkpoint()

    async def part(self, index: int, max_bytes: int, moved: Any) -> bytes:
        return self.chunks[index]


async def test_a_replica_that_is_not_finite_is_found_at_once(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """It is not the leader that is blamed at the end, and the next one, and the next one."""
    async with world(tmp_path) as made, made.fetcher() as honest, made.fetcher() as other:
        phi_P, delta_P = empty_vectors()
        download, liar = StateDownload(phi_P, delta_P, takes_any_replica=True), Infinite(other.talk)
        described = await honest.description(ExpectedState(GROUP), P)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(download.follow, honest, described)
            await wait_all_tasks_blocked()
            with pytest.raises(RemoteProtocolError, match="not finite"):
                await download.help(liar, liar.of(described))
        assert download.remotes == [honest.remote_peer_id]
        assert (phi_P == made.source.phi_P).all()
        assert (delta_P == made.source.delta_P).all()


async def test_what_the_vectors_hold_already_does_not_come_again(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        phi_P, delta_P = made.source.phi_P.copy(), made.source.delta_P.copy()
        delta_P[-1] += 1.0  # the last chunk is another
        download = StateDownload(phi_P, delta_P, own_digests(phi_P, delta_P))
        await download.follow(fetcher, await fetcher.description(ExpectedState(GROUP), P))
        assert (delta_P == made.source.delta_P).all()
        assert download.fetched_bytes == STATE_CHUNK_BYTES + state_bytes(P) % STATE_CHUNK_BYTES
        assert download.kept_bytes == 2 * STATE_CHUNK_BYTES


async def test_chunks_of_zeros_need_not_come(autojump_clock: MockClock, tmp_path: Path) -> None:
    """Whatever the vectors held before."""
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        made.source.delta_P[:] = 0
        phi_P, delta_P = np.ones((2, P), np.float32)
        download = StateDownload(phi_P, delta_P)
        await download.follow(fetcher, await fetcher.description(ExpectedState(GROUP), P))
        assert (phi_P == made.source.phi_P).all()
        assert not delta_P.any()
        assert download.fetched_bytes == 2 * STATE_CHUNK_BYTES  # the weights end in the second


async def test_zeros_are_nobodys_gift_and_no_part_of_a_checkpoint(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        made.source.delta_P[:] = 0
        vectors = made.source.phi_P.copy(), made.source.delta_P.copy()
        download = StateDownload(*vectors, own_digests(*vectors))
        silent = Silent(fetcher.talk)
        with pytest.raises(StreamLost):
            await download.follow(silent, await silent.description(ExpectedState(GROUP), P))
        assert download.remotes == []
        assert download.kept_bytes == STATE_CHUNK_BYTES  # the second: the first is its writer's


class Silent(ContentClient):
    """A source that is gone before it gives anything."""

    remote_peer_id = "silent"

    async def request(self, content: str, parts: Sequence[int]) -> None:
        raise StreamLost("gone")


async def test_what_a_helper_owed_that_cannot_be_asked_is_asked_of_others(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        download, silent = StateDownload(*empty_vectors()), Silent(fetcher.talk)
        described = await fetcher.description(ExpectedState(GROUP), P)
        plan = download.plan
        plan.follow_manifest("leader", described.digests)
        with pytest.raises(StreamLost):
            await download.help(silent, described)
        asked = []
        while batch := plan.next_of("leader"):
            asked += [request.item for request, _ in batch]
            for request, chunks in batch:
                for index in chunks:
                    plan.arrived("leader", index)
                plan.answered(request)
        assert asked == list(range(len(described.digests)))


class Outvoted(ContentClient):
    """An honest leader: while its first chunks are on their way, two others name another one."""

    remote_peer_id = "leader"
    download: StateDownload
    others: list[bytes]

    async def request(self, content: str, parts: Sequence[int]) -> None:
        if parts[0] == 0:
            self.download.plan.add_helper("b", self.others)
            self.download.plan.add_helper("c", self.others)
        await super().request(content, parts)


async def test_a_leader_is_not_blamed_for_bytes_that_are_wanted_no_more(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        phi_P, delta_P = empty_vectors()
        leader = Outvoted(fetcher.talk)
        download = leader.download = StateDownload(phi_P, delta_P)
        described = await leader.description(ExpectedState(GROUP), P)
        leader.others = list(described.digests)
        leader.others[1] = bytes(32)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(download.follow, leader, described)
            await trio.sleep(5.0)
            assert download.missing_bytes == STATE_CHUNK_BYTES
            download.plan.gone("b")
            download._tell()
        assert (phi_P == made.source.phi_P).all()


class OutvotedLast(ContentClient):
    """An honest leader: when its last chunk is asked for, others come that name another one."""

    remote_peer_id = "leader"
    download: StateDownload
    others: Sequence[bytes]
    come: Callable[[], None]

    async def request(self, content: str, parts: Sequence[int]) -> None:
        if parts[0] == len(self.others) - 1:
            self.download.plan.add_helper("c", self.others)
            self.download.plan.add_helper("d", self.others)
            self.come()
            await wait_all_tasks_blocked()
        await super().request(content, parts)


class Other(Infinite):
    """A source whose chunks are ones."""

    remote_peer_id = "b"
    chunks = tuple(np.ones(len(chunk) // 4, np.float32).tobytes() for chunk in Infinite.chunks)


async def test_who_waits_hears_of_a_free_place_when_what_comes_is_not_wanted(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.content.scheduler.MAX_ASKED", 1)
    async with world(tmp_path) as made, made.fetcher() as fetcher, made.fetcher() as second:
        phi_P, delta_P = empty_vectors()
        leader, other = OutvotedLast(fetcher.talk), Other(second.talk)
        leader.download = download = StateDownload(phi_P, delta_P)
        described = await leader.description(ExpectedState(GROUP), P)
        leader.others = (*described.digests[:-1], other.of(described).digests[-1])
        theirs = replace(described, digests=leader.others)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                leader.come = lambda: nursery.start_soon(download.help, other, theirs)
                await download.follow(leader, described)
        assert delta_P[-1] == 1.0


LAG = 100


@pytest.mark.parametrize("behind", [LAG, LAG + 1], ids=["near", "too far behind"])
async def test_what_is_of_another_time_than_the_new_leaders_state_comes_again(
    autojump_clock: MockClock, tmp_path: Path, behind: int
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher, made.fetcher() as second:
        phi_P, delta_P = empty_vectors()
        download = StateDownload(phi_P, delta_P, takes_any_replica=True, lost_lag=LAG)
        first = Stopping(fetcher.talk)
        described = await first.description(ExpectedState(GROUP), P)
        with pytest.raises(StreamLost):
            await download.follow(first, described)
        assert download.remotes == ["first"]
        scalars = structs.replace(described.scalars, step=described.scalars.step + behind)
        newer = replace(described, scalars=scalars)
        with suppress(RemoteProtocolError):  # its header says another step than this
            await download.follow(second, newer)
        assert ("first" in download.remotes) == (behind <= LAG)


class Stopping(ContentClient):
    """A source that is gone when it has given two chunks."""

    remote_peer_id = "first"

    async def part(self, index: int, max_bytes: int, moved: Any) -> bytes:
        if index > 1:
            raise StreamLost("gone")
        return await super().part(index, max_bytes, moved)


@pytest.mark.parametrize(("apart", "helps"), [(LAG, True), (-LAG, True), (LAG + 1, False)])
async def test_a_state_of_another_time_does_not_help(
    autojump_clock: MockClock, tmp_path: Path, apart: int, helps: bool
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        download = StateDownload(*empty_vectors(), takes_any_replica=True, lost_lag=LAG)
        described = await fetcher.description(ExpectedState(GROUP), P)
        await download.follow(fetcher, described)
        scalars = structs.replace(described.scalars, step=described.scalars.step + apart)
        assert download.plan.is_of_one_time(scalars.step) is helps
