"""Serving and fetching run spec, blobs and state, on the simulated network."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from msgspec.structs import replace
from service_worlds import BLOB, DIGEST, FOUNDER, GROUP, SIGNED, P, empty_vectors, world
from trio.testing import MockClock

from peer.content import service
from peer.content.fetching import ExpectedState, whole_state
from peer.content.service import ContentService, WrittenState
from peer.daemon.kept_experts import first_state
from protocol.content.samples import BLOCK_VALUES, block_starts
from protocol.errors import Refused, RemoteProtocolError, StreamLost
from protocol.limits import STATE_CHUNK_BYTES
from protocol.membership.group import Group
from protocol.outcomes import RefusalReason
from protocol.wire.content_messages import GetParts, GetState, Part
from protocol.wire.versions import CONTENT
from simulation.work import SimulatedWork


async def test_spec_blob_and_state_come_over_one_stream(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        signed = await fetcher.spec(SIGNED.run_id)
        assert signed == SIGNED
        assert await fetcher.blob(DIGEST) == BLOB
        phi_P, delta_P = empty_vectors()
        scalars = await whole_state(fetcher, ExpectedState(GROUP), phi_P, delta_P)
        assert (phi_P == made.source.phi_P).all()
        assert (delta_P == made.source.delta_P).all()
        assert (scalars.round, scalars.position) == (4, 77)
        assert made.source.writes == 1
        await whole_state(fetcher, ExpectedState(GROUP), *empty_vectors())
        assert made.source.writes == 1  # the file of this round is there already


async def test_a_blob_that_is_not_there_is_refused(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """What the run names is served, not whatever file has such a name."""
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        (tmp_path / ("0" * 32)).write_text("mine")
        with pytest.raises(Refused) as refused:
            await fetcher.blob("0" * 32)
        assert refused.value.reason is RefusalReason.UNAVAILABLE


async def test_a_blob_that_is_gone_or_too_large_is_refused_unread(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        monkeypatch.setattr(service, "MAX_BLOB_BYTES", len(BLOB) - 1)
        with pytest.raises(Refused, match="larger than"):
            await fetcher.blob(DIGEST)
        (tmp_path / "blob").unlink()
        with pytest.raises(Refused, match="cannot read.*No such file") as refused:
            await fetcher.blob(DIGEST)
        assert str(tmp_path) not in str(refused.value)
        assert await fetcher.spec(SIGNED.run_id) == SIGNED


async def test_a_state_that_cannot_be_written_is_refused(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:

        async def full(_: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

        monkeypatch.setattr(made.source, "write", full)
        with pytest.raises(Refused, match="No space left") as refused:
            await whole_state(fetcher, ExpectedState(GROUP), *empty_vectors())
        assert str(tmp_path) not in str(refused.value)


async def test_chunks_beyond_the_end_are_refused(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        await whole_state(fetcher, ExpectedState(GROUP), *empty_vectors())
        written = await made.service.write()
        assert written is not None
        talk = fetcher.talk
        await talk.send(GetParts(written[1].root, ((1 << 31) - 1,)))
        with pytest.raises(Refused, match="no further chunks"):
            await talk.receive(Part, timeout_s=5.0)


async def test_the_state_of_another_group_is_refused_and_counted(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        for stray in (Group(SIGNED.run_id, "stage/1").digest, Group("0" * 32).digest):
            with pytest.raises(Refused, match=stray) as refused:
                await whole_state(fetcher, ExpectedState(stray), *empty_vectors())
            assert refused.value.reason is RefusalReason.OTHER_GROUP
        assert made.service.refused == {RefusalReason.OTHER_GROUP: 2}
        await whole_state(fetcher, ExpectedState(GROUP), *empty_vectors())  # the stream goes on


async def test_the_state_of_another_group_that_is_kept_here_is_given_and_no_sample_of_it(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    group, slow_P = Group(SIGNED.run_id, "expert/1").digest, np.arange(P, dtype=np.float32)
    slow_P.tofile(tmp_path / "weights.f32")
    kept = first_state(group, tmp_path / "weights.f32", "cd" * 16, SimulatedWork())

    async def other(asked: str) -> WrittenState | None:
        return kept if asked == group else None

    async with world(tmp_path) as made, made.fetcher() as fetcher:
        made.service.other = other
        phi_P, delta_P = empty_vectors()
        state = await whole_state(fetcher, ExpectedState(group, maximum_step=0), phi_P, delta_P)
        assert (state.round, state.step) == (-1, 0)
        np.testing.assert_array_equal(phi_P, slow_P)
        assert not delta_P.any()
        with pytest.raises(Refused):  # it would be read from the disk for each
            await fetcher.sample(group, bytes(16))
        await whole_state(fetcher, ExpectedState(GROUP), *empty_vectors())


async def test_before_the_first_state_there_is_none_to_give(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path, with_state=False) as made, made.fetcher() as fetcher:
        with pytest.raises(Refused, match="no state yet"):
            await whole_state(fetcher, ExpectedState(GROUP), *empty_vectors())


async def test_a_state_that_is_too_old_is_refused_and_not_written(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        step = made.source.step
        with pytest.raises(Refused, match=f"of step {step}, {step + 1} or later") as refused:
            await whole_state(fetcher, ExpectedState(GROUP, step + 1), *empty_vectors())
        assert refused.value.reason is RefusalReason.UNAVAILABLE
        assert made.source.writes == 0
        state = await whole_state(fetcher, ExpectedState(GROUP, step), *empty_vectors())
        assert (state.round, state.step) == (made.source.round, step)


async def test_a_file_of_the_round_that_is_too_old_is_refused(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        made.source.written_step = 230
        await whole_state(fetcher, ExpectedState(GROUP, 230), *empty_vectors())
        with pytest.raises(Refused, match="of step 230, 231 or later"):
            await whole_state(fetcher, ExpectedState(GROUP, 231), *empty_vectors())


async def test_an_old_state_for_one_who_asked_for_a_newer_is_not_taken(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ContentService._send_manifest

    async def overlook(service: ContentService, reader: Any, request: GetState) -> None:
        await honest(service, reader, replace(request, minimum_step=0))

    monkeypatch.setattr(ContentService, "_send_manifest", overlook)
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        phi_P, delta_P = empty_vectors()
        with pytest.raises(RemoteProtocolError, match="of step 250, where 251 or later"):
            await whole_state(fetcher, ExpectedState(GROUP, 251), phi_P, delta_P)
        assert not phi_P.any()


@pytest.mark.parametrize(
    ("expected", "why"),
    [
        (ExpectedState(GROUP, maximum_step=249), "step 250, where nobody can be beyond 249"),
        (ExpectedState(GROUP, layout_digest="ef" * 16), "layout .* which is not ours"),
    ],
)
async def test_a_state_that_cannot_be_is_not_even_fetched(
    autojump_clock: MockClock, tmp_path: Path, expected: ExpectedState, why: str
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        with pytest.raises(RemoteProtocolError, match=why):
            await whole_state(fetcher, expected, *empty_vectors())
        assert made.client.statistics().received_bytes[CONTENT] < STATE_CHUNK_BYTES


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
            await whole_state(fetcher, ExpectedState(GROUP), *empty_vectors())


async def test_a_run_spec_of_another_run_is_not_believed(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        with pytest.raises(RemoteProtocolError, match="was asked for"):
            await fetcher.spec("0" * 32)


async def test_a_source_that_dies_in_the_middle_is_a_lost_stream(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, trio.open_nursery() as nursery:

        async def die_half_way() -> None:
            while made.client.statistics().received_bytes.get(CONTENT, 0) < 4 * P:
                await trio.sleep(0.01)
            made.internet.kill(FOUNDER.peer_id)

        nursery.start_soon(die_half_way)
        async with made.fetcher() as fetcher:
            with pytest.raises(StreamLost):
                await whole_state(fetcher, ExpectedState(GROUP), *empty_vectors())


async def test_a_sample_is_of_the_places_that_the_seed_says(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        made.source.phi_P[:] = np.arange(made.source.phi_P.size)
        values = await fetcher.sample(GROUP, bytes(16))
        starts = block_starts(bytes(16), made.source.phi_P.size)
        assert list(values[::BLOCK_VALUES]) == starts
        with pytest.raises(Refused) as refused:
            await fetcher.sample("ef" * 16, bytes(16))
        assert refused.value.reason is RefusalReason.OTHER_GROUP
