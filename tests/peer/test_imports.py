"""What imports have to do with garbage."""

import gc

import pytest

from peer.process.imports import large_imports


def test_nothing_is_collected_meanwhile_and_everything_afterwards():
    with pytest.raises(ImportError), large_imports():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_what_was_imported_is_looked_through_no_more():
    with large_imports():
        stays: list[list[int]] = [[]]
    assert not any(each is stays for each in gc.get_objects())


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with large_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
