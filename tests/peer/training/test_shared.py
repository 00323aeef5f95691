"""Shared memory: who may write, and what half a write looks like."""

import mmap
import os

import numpy as np
import pytest

from peer.training.shared import (
    CodeRegions,
    SharedVector,
    map_vector,
)

CODE_BYTES = 5000
REGIONS = 2


@pytest.fixture
def regions():
    daemon = CodeRegions.create((CODE_BYTES,) * REGIONS)
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


def test_a_committed_region_holds_its_codes_and_header(regions):
    trainer = CodeRegions(regions.fd, regions.code_bytes, writable=True)
    for region in range(REGIONS):
        trainer.begin(region)[:] = bytes([region + 1]) * CODE_BYTES
        trainer.commit(region, 40 + region, f"{region}" * 32)
    for region in range(REGIONS):
        header = regions.header(region)
        assert (header.sequence, header.cycle, header.digest) == (
            region + 1,
            40 + region,
            f"{region}" * 32,
        )
        assert bytes(regions.codes(region)) == bytes([region + 1]) * CODE_BYTES


def test_a_region_that_is_being_written_holds_nothing(regions):
    trainer = CodeRegions(regions.fd, regions.code_bytes, writable=True)
    assert regions.header(0) is None
    trainer.begin(0)
    trainer.commit(0, 1, "a" * 32)
    trainer.begin(1)
    trainer.commit(1, 2, "b" * 32)
    trainer.begin(0)[:] = bytes(CODE_BYTES)
    assert regions.header(0) is None
    assert regions.header(1).cycle == 2


def test_the_daemon_only_reads(regions):
    with pytest.raises(TypeError):
        regions.codes(0)[0] = 1
    with pytest.raises(IndexError):
        regions.codes(REGIONS)


def test_memory_without_memfd_is_a_file_without_a_name(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with SharedVector(256, tmp_path) as slow:
        slow.array[:] = 2
        assert map_vector(slow.read_only_fd).sum() == 512
    assert list(tmp_path.iterdir()) == []
