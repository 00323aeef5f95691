"""Shared memory: who may write, and what half a write looks like."""

import mmap
import os

import numpy as np
import pytest

from peer.training.shared import (
    NUM_SLOTS,
    CodeRegions,
    SharedVector,
    map_vector,
)

CODE_BYTES = 5000


@pytest.fixture
def slots():
    daemon = CodeRegions.create((CODE_BYTES,) * NUM_SLOTS)
    yield daemon
    daemon.close()


def test_the_trainer_sees_what_the_daemon_writes_but_cannot_write():
    with SharedVector(256) as slow:
        seen = map_vector(slow.read_only_fd)
        slow.array[:] = np.arange(256)
        assert np.array_equal(seen, np.arange(256, dtype=np.float32))
        assert not seen.flags.writeable
        with pytest.raises(PermissionError):
            mmap.mmap(slow.read_only_fd, 0, access=mmap.ACCESS_WRITE)


def test_views_outlive_the_descriptors():
    with SharedVector(256) as slow:
        slow.array[:] = 1
    assert slow.array.sum() == 256


def test_a_committed_slot_holds_its_codes_and_header(slots):
    trainer = CodeRegions(slots.fd, slots.code_bytes, writable=True)
    for slot in range(NUM_SLOTS):
        trainer.begin(slot)[:] = bytes([slot + 1]) * CODE_BYTES
        trainer.commit(slot, 40 + slot, f"{slot}" * 32)
    for slot in range(NUM_SLOTS):
        header = slots.header(slot)
        assert (header.sequence, header.round, header.digest) == (
            slot + 1,
            40 + slot,
            f"{slot}" * 32,
        )
        assert bytes(slots.codes(slot)) == bytes([slot + 1]) * CODE_BYTES


def test_a_slot_that_is_being_written_holds_nothing(slots):
    trainer = CodeRegions(slots.fd, slots.code_bytes, writable=True)
    assert slots.header(0) is None
    trainer.begin(0)
    trainer.commit(0, 1, "a" * 32)
    trainer.begin(1)
    trainer.commit(1, 2, "b" * 32)
    trainer.begin(0)[:] = bytes(CODE_BYTES)
    assert slots.header(0) is None
    assert slots.header(1).round == 2


def test_the_daemon_only_reads(slots):
    with pytest.raises(TypeError):
        slots.codes(0)[0] = 1
    with pytest.raises(IndexError):
        slots.codes(NUM_SLOTS)


def test_memory_without_memfd_is_a_file_without_a_name(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with SharedVector(256, tmp_path) as slow:
        slow.array[:] = 2
        assert map_vector(slow.read_only_fd).sum() == 512
    assert list(tmp_path.iterdir()) == []
