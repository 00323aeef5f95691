"""Blocks that are asked for again: each once, and at most twice."""

import numpy as np
import pytest

from protocol.errors import RemoteProtocolError
from protocol.gossip.exchange import MAX_QUESTIONS, Answering, Asking, map_of

BLOCKS = 11


def marks(*places: int) -> np.ndarray:
    found = np.zeros(BLOCKS, np.bool_)
    found[list(places)] = True
    return found


def test_bad_blocks_are_asked_for_then_all_others_then_none():
    asking, answering = Asking(BLOCKS), Answering(BLOCKS)
    first = asking.next(marks(2, 10))
    assert first is not None
    assert first.tolist() == marks(2, 10).tolist()
    assert answering.take(map_of(first)).tolist() == first.tolist()
    rest = asking.next()
    assert rest is not None
    assert rest.tolist() == (~first).tolist()
    assert answering.take(map_of(rest)).tolist() == rest.tolist()
    assert asking.next() is None


def test_where_all_is_bad_nothing_is_left():
    asking = Asking(BLOCKS)
    first = asking.next(marks(*range(BLOCKS)))
    assert first is not None
    assert first.all()
    assert asking.next() is None


@pytest.mark.parametrize(
    ("bits", "why"),
    [
        (b"", "a map of 0 bytes"),
        (b"\x80", "a map of 1 bytes"),
        (b"\x80\0\0", "a map of 3 bytes"),
        (b"\0\0", "no block of this vector"),
        (b"\x80\x01", "no block of this vector"),
        (b"\x20\0", "asked for twice"),
    ],
)
def test_a_question_that_no_reader_has_is_refused(bits, why):
    answering = Answering(BLOCKS)
    answering.take(map_of(marks(2)))
    with pytest.raises(RemoteProtocolError, match=why):
        answering.take(bits)


def test_questions_are_few():
    answering = Answering(BLOCKS)
    for place in range(MAX_QUESTIONS):
        answering.take(map_of(marks(place)))
    with pytest.raises(RemoteProtocolError, match="more than 2 questions"):
        answering.take(map_of(marks(9)))
