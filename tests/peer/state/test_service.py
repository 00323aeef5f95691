"""Serving and fetching run spec, blobs and state, on the simulated network."""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt
import pytest
import trio
from trio.testing import MockClock

from peer.network.conversation import Conversation
from peer.network.simulated import SimulatedInternet, SimulatedNetwork
from peer.ports.simulated import SimulatedWork
from peer.simulation.swarm import identity_of
from peer.state import service
from peer.state.service import REQUEST_S, StateService, fetch_from
from peer.state.state_file import StateManifest, StateScalars, write_state_file
from protocol.errors import Refused, RemoteProtocolError, StreamLost
from protocol.limits import MAX_STATE_READERS, STATE_CHUNK_BYTES
from protocol.membership.group import Group
from protocol.outcomes import RefusalReason
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.wire.messages import Chunk, GetChunks, GetState
from protocol.wire.versions import STATE

P = 3 * STATE_CHUNK_BYTES // 8
FOUNDER = identity_of(1, "founder")
SIGNED = SignedSpec.signed_by(RunSpec(name="toy"), FOUNDER.public_key, FOUNDER.sign)
BLOB = b"a corpus" * 1000
GROUP = Group(SIGNED.run_id).digest
DIGEST = blake3.blake3(BLOB).hexdigest(length=16)


def _empty_vectors() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    return np.zeros(P, np.float32), np.zeros(P, np.float32)


class Source:
    """Implements StateSource."""

    group = GROUP

    def __init__(self) -> None:
        self.round, self.step = 4, 250
        self.written_step = 250
        self.writes = 0
        rng = np.random.default_rng(0)
        self.phi_P, self.delta_P = (rng.normal(size=P).astype(np.float32) for _ in range(2))

    async def write(self, directory: Path) -> tuple[Path, StateManifest]:
        self.writes += 1
        path = directory / f"{self.round}.state"
        scalars = StateScalars(GROUP, self.round, self.written_step, "cd" * 16, 0, 77, 12, 0.5)
        return path, write_state_file(path, scalars, self.phi_P, self.delta_P)


class World:
    def __init__(self, service: StateService, source: Source, folder: Path) -> None:
        self.service, self.source, self.folder = service, source, folder
        self.internet: SimulatedInternet
        self.client: SimulatedNetwork

    def fetcher(self):
        return fetch_from(self.client, FOUNDER.peer_id)


@asynccontextmanager
async def world(folder: Path, *, with_state: bool = True) -> AsyncIterator[World]:
    internet = SimulatedInternet(1)
    (folder / "blob").write_bytes(BLOB)
    async with (
        internet.open_network(FOUNDER.peer_id) as server,
        internet.open_network(identity_of(1, "joiner").peer_id) as client,
    ):
        service = StateService(
            network=server,
            work=SimulatedWork(),
            state_dir=folder,
            signed=SIGNED,
            blobs={DIGEST: folder / "blob"},
        )
        made = World(service, Source(), folder)
        made.internet, made.client = internet, client
        if with_state:
            service.serve_state_of(made.source)
        await service.start()
        await client.connect(FOUNDER.peer_id, server.addresses)
        yield made


async def test_spec_blob_and_state_come_over_one_stream(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        signed = await fetcher.spec(SIGNED.run_id)
        assert signed == SIGNED
        assert await fetcher.blob(DIGEST) == BLOB
        shares: list[float] = []
        phi_P, delta_P = _empty_vectors()
        scalars = await fetcher.state(GROUP, phi_P, delta_P, shares.append)
        assert (phi_P == made.source.phi_P).all()
        assert (delta_P == made.source.delta_P).all()
        assert (scalars.round, scalars.position) == (4, 77)
        assert shares[-1] == 1.0
        assert made.source.writes == 1
        await fetcher.state(GROUP, *_empty_vectors())
        assert made.source.writes == 1  # the file of this round is there already


async def test_a_blob_that_is_not_there_is_refused(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        with pytest.raises(Refused) as refused:
            await fetcher.blob("0" * 32)
        assert refused.value.reason is RefusalReason.UNAVAILABLE


async def test_a_blob_that_is_gone_or_too_large_is_refused_unread(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        monkeypatch.setattr(service, "MAX_BLOB_BYTES", len(BLOB) - 1)
        with pytest.raises(Refused, match="no blob .* of at most"):
            await fetcher.blob(DIGEST)
        (tmp_path / "blob").unlink()
        with pytest.raises(Refused, match="cannot read"):
            await fetcher.blob(DIGEST)
        assert await fetcher.spec(SIGNED.run_id) == SIGNED


async def test_a_state_that_cannot_be_written_is_refused(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:

        async def full(_: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(made.source, "write", full)
        with pytest.raises(Refused, match="No space left"):
            await fetcher.state(GROUP, *_empty_vectors())


async def test_chunks_beyond_the_end_are_refused(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        await fetcher.state(GROUP, *_empty_vectors())
        written = await made.service.write()
        assert written is not None
        talk = fetcher._talk
        await talk.send(GetChunks(written[1].root.hex(), 1 << 50, 1))
        with pytest.raises(Refused, match="replaced"):
            await talk.receive(Chunk, timeout_s=5.0)


async def test_the_state_of_another_group_is_refused_and_counted(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        for stray in (Group(SIGNED.run_id, "stage/1").digest, Group("0" * 32).digest):
            with pytest.raises(Refused, match=stray) as refused:
                await fetcher.state(stray, *_empty_vectors())
            assert refused.value.reason is RefusalReason.OTHER_GROUP
        assert made.service.refused == {RefusalReason.OTHER_GROUP: 2}
        await fetcher.state(GROUP, *_empty_vectors())  # the stream goes on


async def test_before_the_first_state_there_is_none_to_give(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path, with_state=False) as made, made.fetcher() as fetcher:
        with pytest.raises(Refused, match="no state yet"):
            await fetcher.state(GROUP, *_empty_vectors())


async def test_a_state_that_is_too_old_is_refused_and_not_written(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        step = made.source.step
        with pytest.raises(Refused, match=f"of step {step}, {step + 1} or later") as refused:
            await fetcher.state(GROUP, *_empty_vectors(), minimum_step=step + 1)
        assert refused.value.reason is RefusalReason.UNAVAILABLE
        assert made.source.writes == 0
        state = await fetcher.state(GROUP, *_empty_vectors(), minimum_step=step)
        assert (state.round, state.step) == (made.source.round, step)


async def test_a_file_of_the_round_that_is_too_old_is_refused(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        made.source.written_step = 230
        await fetcher.state(GROUP, *_empty_vectors(), minimum_step=230)
        with pytest.raises(Refused, match="of step 230, 231 or later"):
            await fetcher.state(GROUP, *_empty_vectors(), minimum_step=231)


async def test_an_old_state_for_one_who_asked_for_a_newer_is_not_taken(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = StateService._send_manifest

    async def overlook(service: StateService, talk: Conversation, request: GetState) -> None:
        await honest(service, talk, replace(request, minimum_step=0))

    monkeypatch.setattr(StateService, "_send_manifest", overlook)
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        phi_P, delta_P = _empty_vectors()
        with pytest.raises(RemoteProtocolError, match="of step 250, where 251 or later"):
            await fetcher.state(GROUP, phi_P, delta_P, minimum_step=251)
        assert not phi_P.any()


async def test_a_blob_with_other_bytes_is_not_believed(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        (tmp_path / "blob").write_bytes(BLOB[:-1] + b"X")
        with pytest.raises(RemoteProtocolError, match="digest"):
            await fetcher.blob(DIGEST)


async def test_a_chunk_with_other_bytes_is_not_believed(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        written = await made.service.write()
        assert written is not None
        data = bytearray(written[0].read_bytes())
        data[2 * STATE_CHUNK_BYTES + 5] ^= 1
        written[0].write_bytes(data)
        with pytest.raises(RemoteProtocolError):
            await fetcher.state(GROUP, *_empty_vectors())


async def test_a_run_spec_of_another_run_is_not_believed(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        with pytest.raises(RemoteProtocolError, match="was asked for"):
            await fetcher.spec("0" * 32)


async def test_readers_are_bounded_and_a_silent_one_makes_room(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, trio.open_nursery() as nursery:

        async def hold() -> None:
            async with made.fetcher() as fetcher:
                await fetcher.spec(None)
                await trio.sleep(2 * REQUEST_S)

        for _ in range(MAX_STATE_READERS):
            nursery.start_soon(hold)
        await trio.sleep(1.0)
        async with made.fetcher() as fetcher:
            with pytest.raises(Refused) as refused:
                await fetcher.spec(None)
        assert refused.value.reason is RefusalReason.TOO_MANY
        await trio.sleep(REQUEST_S)
        async with made.fetcher() as fetcher:
            assert await fetcher.spec(None) == SIGNED
        nursery.cancel_scope.cancel()


async def test_a_source_that_dies_in_the_middle_is_a_lost_stream(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, trio.open_nursery() as nursery:

        async def die_half_way() -> None:
            while made.client.statistics().received_bytes.get(STATE, 0) < 4 * P:
                await trio.sleep(0.01)
            made.internet.kill(FOUNDER.peer_id)

        nursery.start_soon(die_half_way)
        async with made.fetcher() as fetcher:
            with pytest.raises(StreamLost):
                await fetcher.state(GROUP, *_empty_vectors())
