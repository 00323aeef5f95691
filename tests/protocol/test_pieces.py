"""Cutting a contribution into pieces, and knowing when all are here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError
from protocol.limits import PIECE_BYTES
from protocol.wire.pieces import Incoming, OutgoingPieces

TOTAL = 3 * PIECE_BYTES + 5


def pieces_of(total_bytes: int) -> list[tuple[int, int]]:
    outgoing = OutgoingPieces(total_bytes)
    return list(iter(outgoing.take, None))


@given(st.integers(1, 5 * PIECE_BYTES))
def test_the_pieces_are_the_whole_without_gap_or_overlap(total_bytes):
    pieces = pieces_of(total_bytes)
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
    assert pieces[-1][1] == total_bytes
    assert all(stop - start == PIECE_BYTES for start, stop in pieces[:-1])
    assert 0 < pieces[-1][1] - pieces[-1][0] <= PIECE_BYTES


@given(st.permutations(pieces_of(TOTAL)))
def test_it_is_whole_with_the_last_piece_in_any_order(pieces):
    incoming = Incoming(TOTAL)
    for start, stop in pieces:
        assert not incoming.is_whole
        incoming.announce(start, stop - start)
        assert not incoming.is_whole
        incoming.arrive(start)
    assert incoming.is_whole


@pytest.mark.parametrize(
    ("start", "num_bytes", "sentence"),
    [
        (1, PIECE_BYTES, "no piece begins at byte 1 "),
        (4 * PIECE_BYTES, 5, "no piece begins"),
        (1 << 62, 5, "no piece begins"),
        (0, PIECE_BYTES - 1, "a piece of"),
        (3 * PIECE_BYTES, PIECE_BYTES, "a piece of"),
        (3 * PIECE_BYTES, 0, "a piece of"),
        (PIECE_BYTES, PIECE_BYTES, "came twice"),
    ],
)
def test_what_is_no_piece_of_the_whole_is_their_fault(start, num_bytes, sentence):
    incoming = Incoming(TOTAL)
    incoming.announce(PIECE_BYTES, PIECE_BYTES)
    with pytest.raises(RemoteProtocolError, match=sentence):
        incoming.announce(start, num_bytes)
