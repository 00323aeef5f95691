"""Shared memory: who may write, and what outlives what."""

import mmap
import os
import tempfile

import numpy as np
import pytest

from peer.training.shared import (
    CodeRegions,
    SharedVector,
    code_memory,
    map_vector,
)

CODE_BYTES = 5000
REGIONS = 2


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


def test_what_the_trainer_writes_the_daemon_reads():
    fd, sizes = code_memory(), (CODE_BYTES,) * REGIONS
    trainer = CodeRegions(fd, sizes, writable=True)
    daemon = CodeRegions(fd, sizes, writable=False)
    os.close(fd)
    for region in range(REGIONS):
        trainer.codes(region)[:] = bytes([region + 1]) * CODE_BYTES
    for region in range(REGIONS):
        assert bytes(daemon.codes(region)) == bytes([region + 1]) * CODE_BYTES
    with pytest.raises(TypeError):
        daemon.codes(0)[0] = 1
    with pytest.raises(IndexError):
        daemon.codes(REGIONS)


def test_memory_without_memfd_is_a_file_without_a_name(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with SharedVector(256) as slow:
        slow.array[:] = 2
        assert map_vector(slow.read_only_fd).sum() == 512
    assert list(tmp_path.iterdir()) == []
