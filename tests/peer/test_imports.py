"""What imports have to do with garbage."""

import gc

import pytest

from peer.process.imports import large_imports


def test_nothing_is_collected_meanwhile_and_everything_afterwards():
    with pytest.raises(ImportError), large_imports():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with large_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
