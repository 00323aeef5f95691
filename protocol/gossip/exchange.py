"""One exchange of vectors between two peers: when may it be applied?

The idea. Both send their vector on one stream at once, and confirm the other's with a receipt as
soon as it is here. A peer that holds the partner's vector *and* knows that the partner holds its
own applies. The last receipt can be lost, as in every such protocol: then one side applies alone.

Rules
  1. Applied on one side implies held on both: a peer applies only with their vector here, and
     their receipt for ours.
  2. A peer that holds their vector when the exchange ends without a receipt skips as `unsettled`:
     nearly always its own vector was still on its way, and the partner skips too. Only where a
     receipt was on its way do the two sides differ. That is healed by the averaging itself, which
     pulls slow weights together at every later exchange.

A packed vector (peer/codec/differences.py) is read against the reader's own. Where the two are
further apart than the sender thought, a block is read wrongly, and is bad by its sums. The reader
asks for it within the exchange, so that both average with the same numbers:

  3. It asks for the blocks that are bad. If none is, and the digest is wrong all the same, it asks
     for all that it has not asked for. If there is none left, the vector is bad, and nothing is
     averaged.
  4. Its receipt comes after the digest is right, so it asks for nothing after it.
  5. A block is sent again at most once, and at most `MAX_QUESTIONS` are answered: packing never
     costs the sender more than the codes beside what was packed.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from protocol.errors import RemoteProtocolError
from protocol.outcomes import SkipReason

from .matchmaking import pair_rank


def exchange_id(group: str, one: tuple[str, int], other: tuple[str, int]) -> str:
    """32 hex digits, the same for both peers, which bring their rounds of these numbers."""
    return pair_rank(f"exchange/{group}", one, other).hex()


class ExchangeSide:
    """One peer's side of one exchange. What is noted after its end changes nothing.

    Attributes:
        holds: their vector is here, whole, with the right digest and finite.
        delivered: their receipt is here: they hold ours.
        reason: why nothing is applied; None unless that is so.
    """

    def __init__(self) -> None:
        self.holds = self.delivered = False
        self.reason: SkipReason | None = None

    @property
    def is_averaged(self) -> bool:
        return self.holds and self.delivered and self.reason is None

    @property
    def is_final(self) -> bool:
        return (self.holds and self.delivered) or self.reason is not None

    def failed(self, reason: SkipReason) -> None:
        """Nothing more comes, because of this (rule 2)."""
        if not self.is_final:
            self.reason = SkipReason.UNSETTLED if self.holds else reason


MAX_QUESTIONS: Final = 2
"""For what is bad, and for all the rest."""

Marks = npt.NDArray[np.bool_]
"""Which of all blocks."""


class Asking:
    """The blocks that a reader asks for."""

    def __init__(self, blocks: int) -> None:
        self._asked: Marks = np.zeros(blocks, np.bool_)

    def next(self, bad: Marks | None = None) -> Marks | None:
        """The blocks to ask for, or None. `bad` is None when the digest alone is wrong."""
        wanted = ~self._asked if bad is None else bad
        if not wanted.any():
            return None
        self._asked |= wanted
        return wanted


class Answering:
    """The blocks that a sender sends again."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._asked: Marks = np.zeros(blocks, np.bool_)
        self._questions = 0

    @property
    def map_bytes(self) -> int:
        return -(-self._blocks // 8)

    def take(self, bits: Any) -> Marks:
        """The blocks that a question names in a bit map.

        Raises:
            RemoteProtocolError: rule 5, or the map names no block, or one that there is not.
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
