"""State files: whole or not there, verified chunk by chunk, scalars included."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from peer.content.state_file import (
    HEADER_BYTES,
    StateManifest,
    StateMemory,
    chunk_count,
    read_chunk,
    remove_state_files,
    state_bytes,
    write_state,
)
from protocol.content.manifest import digest_of
from protocol.errors import RemoteProtocolError
from protocol.limits import STATE_CHUNK_BYTES
from protocol.wire.content_messages import StateScalars

P = 3 * STATE_CHUNK_BYTES // 8 - HEADER_BYTES // 8 + 128
SCALARS = StateScalars("ab" * 16, 7, 390, "cd" * 16, 2, 12_345, 1 << 40, 0.5)


def _vectors() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    rng = np.random.default_rng(0)
    return rng.normal(size=P).astype(np.float32), rng.normal(size=P).astype(np.float32)


def _zeros(num_values: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    return np.zeros(num_values, np.float32), np.zeros(num_values, np.float32)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StateManifest]:
    path = tmp_path_factory.mktemp("home") / "round-7.state"
    return path, write_state(path, SCALARS, *_vectors())


def _forged(
    scalars: StateScalars, phi: npt.NDArray[Any], delta: npt.NDArray[Any]
) -> tuple[StateManifest, list[bytes]]:
    chunks = list(StateMemory(phi, delta, scalars).chunks())
    digests = tuple(digest_of(chunk) for chunk in chunks)
    return StateManifest(digests, scalars), chunks


@given(order=st.permutations(range(chunk_count(state_bytes(P)))))
@settings(
    deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_chunks_in_any_order_make_the_state(
    written: tuple[Path, StateManifest], order: list[int]
) -> None:
    path, manifest = written
    vectors = _zeros(P)
    assembler = StateMemory(*vectors)
    for index in order:
        assembler.put(index, read_chunk(path, index))
    assembler.check(SCALARS)
    assert manifest.scalars == SCALARS
    for put, written_vector in zip(vectors, _vectors(), strict=True):
        np.testing.assert_array_equal(put, written_vector)
    assert path.stat().st_size == state_bytes(P)


def test_zeros_take_no_room_on_the_disk(tmp_path: Path) -> None:
    num_values = 2 * STATE_CHUNK_BYTES
    phi_P, delta_P = np.ones(num_values, np.float32), np.zeros(num_values, np.float32)
    path = tmp_path / "a.state"
    manifest = write_state(path, SCALARS, phi_P, delta_P)
    chunks = list(StateMemory(phi_P, delta_P, SCALARS).chunks())
    assert [read_chunk(path, index) for index in range(len(chunks))] == chunks
    assert list(manifest.digests) == [digest_of(chunk) for chunk in chunks]
    assert path.stat().st_size == state_bytes(num_values)
    assert path.stat().st_blocks * 512 < 0.6 * state_bytes(num_values)


def test_the_order_of_chunks_is_under_the_root(
    written: tuple[Path, StateManifest],
) -> None:
    _, manifest = written
    swapped = (manifest.digests[1], manifest.digests[0], *manifest.digests[2:])
    assert replace(manifest, digests=swapped).root != manifest.root


@pytest.mark.parametrize("num_values", [P - 128, 1 << 40])
def test_a_manifest_of_another_size_is_refused_before_memory_is_taken(
    written: tuple[Path, StateManifest], num_values: int
) -> None:
    _, manifest = written
    with pytest.raises(RemoteProtocolError, match="expected"):
        manifest.check(num_values)


def test_a_state_of_another_size_that_has_as_many_chunks_ends_with_another_chunk(
    written: tuple[Path, StateManifest],
) -> None:
    path, manifest = written
    manifest.check(P + 128)
    last = len(manifest.digests) - 1
    with pytest.raises(RemoteProtocolError, match=r"bytes, not"):
        StateMemory(*_zeros(P + 128)).put(last, read_chunk(path, last))


@pytest.mark.parametrize(
    "vectors",
    [
        (np.zeros(P, np.float32), np.zeros(P - 128, np.float32)),
        (np.zeros(P, np.float64), np.zeros(P, np.float64)),
        (np.zeros(2 * P, np.float32)[::2], np.zeros(P, np.float32)),
    ],
)
def test_memory_that_holds_no_state_is_refused(
    vectors: tuple[npt.NDArray[Any], npt.NDArray[Any]],
) -> None:
    with pytest.raises(ValueError, match=r"one length|contiguous"):
        StateMemory(*vectors)


@pytest.mark.parametrize(
    "change",
    [
        {"group": "x"},
        {"round": 8},
        {"layout_digest": "x"},
        {"epoch": 3},
        {"position": 0},
        {"tokens": 1},
    ],
)
def test_every_scalar_is_under_the_root(change: dict[str, Any]) -> None:
    vector = np.zeros(128, np.float32)
    manifest, chunks = _forged(SCALARS, vector, vector)
    changed = structs.replace(SCALARS, **change)
    assert _forged(changed, vector, vector)[0].root != manifest.root
    assembler = StateMemory(*_zeros(128))
    assembler.put(0, chunks[0])
    with pytest.raises(RemoteProtocolError, match="header differs"):
        assembler.check(changed)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [5, -1])
def test_a_state_that_is_not_finite_is_refused(bad: float, at: int) -> None:
    vector = np.zeros(P, np.float32)
    vector[at] = bad
    _, chunks = _forged(SCALARS, np.zeros(P, np.float32), vector)
    assembler = StateMemory(*_zeros(P))
    with pytest.raises(RemoteProtocolError, match="not finite"):
        for index, chunk in enumerate(chunks):
            assembler.put(index, chunk)


@given(header=st.binary(max_size=300))
@settings(deadline=None, max_examples=60)
def test_garbage_for_a_header_is_a_protocol_error(header: bytes) -> None:
    for prefix in (b"", b"LOCOST01", b"LOCOST01" + len(header).to_bytes(4, "little")):
        chunk = (prefix + header).ljust(state_bytes(128), b"\0")
        assembler = StateMemory(*_zeros(128))
        with pytest.raises(RemoteProtocolError):
            assembler.put(0, chunk)
            assembler.check(SCALARS)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, vector = tmp_path / "a.state", np.zeros(128, np.float32)
    write_state(path, SCALARS, vector, vector)
    before = path.read_bytes()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("peer.content.state_file.os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_state(path, SCALARS, vector + 1, vector)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_old_files_and_leftovers_are_removed(tmp_path: Path) -> None:
    keep, old = tmp_path / "round-8.state", tmp_path / "round-7.state"
    leftover, other = tmp_path / "round-6.state-partial", tmp_path / "identity"
    for path in (keep, old, leftover, other):
        path.touch()
    remove_state_files(tmp_path, [keep])
    assert sorted(tmp_path.iterdir()) == [other, keep]


@pytest.mark.parametrize("length", [127, 129])
def test_vectors_that_do_not_belong_together_are_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(ValueError, match="one length"):
        write_state(
            tmp_path / "a.state", SCALARS, np.zeros(128, np.float32), np.zeros(length, np.float32)
        )
    with pytest.raises(ValueError, match="fp32"):
        doubles: Any = np.zeros(128)
        write_state(tmp_path / "a.state", SCALARS, doubles, doubles)
    assert not list(tmp_path.iterdir())
