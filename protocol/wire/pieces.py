"""A long contribution in pieces, which travel over several streams and arrive in any order.

Why. One libp2p stream has a window of its own, and news of what was read waits behind the data that
goes the other way; a single stream fills no long link. Streams are not served alike either: a
contribution cut into one share for each stream waits for the slowest at its end. So it is cut into
many small pieces, and a stream that is free takes the next one.

Rules
  1. Piece i holds the bytes from i * PIECE_BYTES on; only the last may be shorter. Both sides know
     the total, so a piece names only its start.
  2. Each piece may arrive once: a second one would be written over bytes that were perhaps already
     checked. It is refused before a byte of it is read.
  3. Any stream may carry any piece. Whether the whole is right is for its digest to say.
"""

from protocol.errors import RemoteProtocolError
from protocol.limits import PIECE_BYTES


class OutgoingPieces:
    """The pieces of our own contribution that no stream has taken yet."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._next_start = 0

    def take(self) -> tuple[int, int] | None:
        """Start and end of the next piece; None when all are taken."""
        start = self._next_start
        if start >= self._total_bytes:
            return None
        self._next_start = min(start + PIECE_BYTES, self._total_bytes)
        return start, self._next_start


class Incoming:
    """The pieces of the partner's contribution: those announced, and how much is not here yet."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._announced = bytearray(-(-total_bytes // PIECE_BYTES))
        self._left_bytes = total_bytes

    @property
    def is_whole(self) -> bool:
        return self._left_bytes == 0

    def announce(self, start: int, num_bytes: int) -> None:
        """A piece is about to come.

        Raises:
            RemoteProtocolError: there is no such piece, or it came before.
        """
        index, rest = divmod(start, PIECE_BYTES)
        if rest or start >= self._total_bytes:
            raise RemoteProtocolError(f"no piece begins at byte {start} of {self._total_bytes}")
        if num_bytes != self._size(start):
            raise RemoteProtocolError(f"a piece of {num_bytes} bytes at byte {start}")
        if self._announced[index]:
            raise RemoteProtocolError(f"the piece at byte {start} came twice")
        self._announced[index] = True

    def arrive(self, start: int) -> None:
        """Note that all bytes of an announced piece are here."""
        self._left_bytes -= self._size(start)

    def _size(self, start: int) -> int:
        return min(PIECE_BYTES, self._total_bytes - start)
