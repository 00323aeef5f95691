"""Blocks of a packed vector that could not be read: who may ask for which, and how often.

A packed vector (peer/codec/differences.py) is read against the reader's own. Where the two are
further apart than the sender thought, a block is read wrongly, and is bad by its sums. So both
average with the same numbers, the reader asks for it, within the exchange:

Rules
  1. It asks for the blocks that are bad. If none is, and the digest is wrong all the same, it asks
     for all that it has not asked for. If there is none left, the vector is bad, and nothing is
     averaged.
  2. Its receipt comes after the digest is right, so it asks for nothing after it.
  3. A block is sent again at most once, and at most `MAX_QUESTIONS` are answered. So whatever a
     reader asks, packing costs the sender never more than the codes beside what was packed.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from protocol.errors import RemoteProtocolError

MAX_QUESTIONS: Final = 2
"""For what is bad, and for all the rest."""

Marks = npt.NDArray[np.bool_]
"""Which of all blocks."""


class Asking:
    """The reader's side: what it asks for next."""

    def __init__(self, blocks: int) -> None:
        self._asked: Marks = np.zeros(blocks, np.bool_)

    @property
    def blocks(self) -> int:
        """How many the vector has."""
        return self._asked.size

    def next(self, bad: Marks | None = None) -> Marks | None:
        """The blocks to ask for; None when all were asked for.

        Args:
            bad: those that are known to be; None when the digest alone is wrong.
        """
        wanted = ~self._asked if bad is None else bad
        if not wanted.any():
            return None
        self._asked |= wanted
        return wanted


class Answering:
    """The sender's side: which questions it answers."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._asked: Marks = np.zeros(blocks, np.bool_)
        self._questions = 0

    @property
    def map_bytes(self) -> int:
        """Length of a map of all blocks."""
        return -(-self._blocks // 8)

    def take(self, bits: Any) -> Marks:
        """A question has come: the blocks that it names in a bit map.

        Raises:
            RemoteProtocolError: rule 3, or the map names no block, or one that there is not.
        """
        self._questions += 1
        if self._questions > MAX_QUESTIONS:
            raise RemoteProtocolError(f"more than {MAX_QUESTIONS} questions for blocks")
        flat = np.frombuffer(bits, np.uint8)
        if flat.size != self.map_bytes:
            raise RemoteProtocolError(f"a map of {flat.size} bytes for {self._blocks} blocks")
        every = np.unpackbits(flat).astype(np.bool_)
        marks = every[: self._blocks]
        if every[self._blocks :].any() or not marks.any():
            raise RemoteProtocolError("a map of no block of this vector")
        if (marks & self._asked).any():
            raise RemoteProtocolError("a block was asked for twice")
        self._asked |= marks
        return marks


def map_of(marks: Marks) -> bytes:
    """The bit map of these blocks: the first in the highest bit of the first byte."""
    return np.packbits(marks).tobytes()
