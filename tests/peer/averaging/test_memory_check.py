"""What the quick check of memory sees, and that spare memory is nobody's."""

import gc

import numpy as np
import pytest
import torch

from peer.averaging.diloco.outer_fragments import SpareMemory, memory_check

VALUES = 1024


def _vector() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(VALUES, np.float32))


@pytest.mark.parametrize("at", [0, 1, 127, 128, VALUES - 1])
@pytest.mark.parametrize("bit", [0, 22, 31])
def test_a_flipped_bit_is_seen(at, bit):
    vector = _vector()
    before = memory_check([vector])
    assert memory_check([vector.clone()]) == before
    vector.numpy().view(np.uint32)[at] ^= np.uint32(1 << bit)
    assert memory_check([vector]) != before


def test_blocks_that_change_places_are_seen():
    vector = _vector()
    swapped = torch.cat([vector[128:256], vector[:128], vector[256:]])
    assert memory_check([swapped]) != memory_check([vector])


def test_pieces_one_after_another_are_as_the_whole():
    vector = _vector()
    assert memory_check([vector[:256], vector[256:]]) == memory_check([vector])


def test_memory_is_used_again_when_its_last_view_is_gone():
    spare = SpareMemory(1000)
    first = spare.take(600)
    part = first[100:200]
    address = np.frombuffer(first, np.uint8).ctypes.data
    del first
    assert spare.spare_bytes == 0
    other = spare.take(600)
    assert np.frombuffer(other, np.uint8).ctypes.data != address
    del part
    gc.collect()
    assert spare.spare_bytes == 600
    again = spare.take(500)
    assert (len(again), np.frombuffer(again, np.uint8).ctypes.data) == (500, address)
    assert spare.spare_bytes == 0


def test_no_more_is_kept_than_allowed_and_nothing_large_is_used_for_little():
    spare = SpareMemory(1000)
    lent = [spare.take(400) for _ in range(4)]
    del lent
    gc.collect()
    assert spare.spare_bytes == 800
    spare.take(100)
    gc.collect()
    assert spare.spare_bytes == 900
