"""The order in which an epoch goes through a corpus: which block stands at which place.

A corpus is cut into pieces of `piece_blocks` blocks (protocol/content/manifest.py); the last one
may be shorter. An order that knew nothing of pieces would make every peer need all of them at once. So
an epoch goes through few pieces at a time:

1. The pieces of an epoch stand in a shuffled order, cut into *strata* of up to STRATUM_COLUMNS
   neighbours. A stratum is gone through whole before the next one begins.
2. The pieces of a stratum are its *columns*. Each *row* takes one block of each of them, the
   columns in an order of the row's own; which block, is drawn from the piece without replacement.
   So neighbours in the order are blocks of different pieces, and of anywhere in them.

    place       0 1 2 ... g-1 | g ...  | ...          g columns, `piece_blocks` rows
                row 0           row 1

Each column is a *hole* in as many rows as its piece has blocks less than `piece_blocks`.

Invariants: places and blocks correspond one to one, holes apart; every peer finds the same, from
seed and epoch alone.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from .shuffle import Int64Vector, permuted

STRATUM_COLUMNS: Final = 256
"""Pieces that an epoch goes through at the same time, at most."""
HOLE: Final = -1


@dataclass(frozen=True, slots=True)
class Cells:
    """Places of an epoch: which column of which stratum, and in which row; int64 [n] each."""

    stratum: Int64Vector
    row: Int64Vector
    column: Int64Vector


@dataclass(frozen=True)
class EpochOrder:
    """The orders of all epochs; `num_blocks` and `piece_blocks` are at least 1."""

    seed: int
    num_blocks: int
    piece_blocks: int

    @property
    def num_pieces(self) -> int:
        """Pieces that hold the blocks."""
        return -(-self.num_blocks // self.piece_blocks)

    @property
    def num_places(self) -> int:
        """Places of an epoch, holes among them."""
        return self.num_pieces * self.piece_blocks

    @property
    def num_strata(self) -> int:
        """Strata of an epoch."""
        return -(-self.num_pieces // STRATUM_COLUMNS)

    @cached_property
    def _first_columns(self) -> Int64Vector:
        strata = np.arange(self.num_strata + 1, dtype=np.int64)
        return strata * self.num_pieces // self.num_strata

    def stratum_at(self, place: int) -> int:
        """The stratum that a place lies in; of the epoch's end, the one after the last."""
        starts = self._first_columns * self.piece_blocks
        return int(np.searchsorted(starts, place, side="right")) - 1

    def pieces_of(self, epoch: int, stratum: int) -> Int64Vector:
        """The pieces of a stratum, column after column."""
        first, end = self._first_columns[stratum : stratum + 2]
        columns = np.arange(end - first, dtype=np.int64)
        return self.pieces(epoch, np.full(end - first, stratum), columns)

    def strata_of_pieces(self, epoch: int) -> Int64Vector:
        """The stratum that each piece is in; int64 [pieces]."""
        strata = np.repeat(np.arange(self.num_strata), np.diff(self._first_columns))
        column = np.arange(self.num_pieces, dtype=np.int64) - self._first_columns[strata]
        found = np.empty(self.num_pieces, np.int64)
        found[self.pieces(epoch, strata, column)] = strata
        return found

    def column_sizes(self, epoch: int, stratum: int) -> tuple[int, ...]:
        """Blocks of each column of a stratum."""
        before = self.pieces_of(epoch, stratum) * self.piece_blocks
        return tuple(np.minimum(self.num_blocks - before, self.piece_blocks).tolist())

    def cells(self, epoch: int, places: Int64Vector) -> Cells:
        """Where these places lie."""
        firsts = self._first_columns
        stratum = np.searchsorted(firsts * self.piece_blocks, places, side="right") - 1
        columns = firsts[stratum + 1] - firsts[stratum]
        row, along = np.divmod(places - firsts[stratum] * self.piece_blocks, columns)
        most = -(-self.num_pieces // self.num_strata)
        row_number = (stratum * self.piece_blocks + row).astype(np.uint64)
        column = permuted(along, columns, most, f"row/{self.seed}/{epoch}", row_number)
        return Cells(stratum, row, column)

    def pieces(self, epoch: int, stratum: Int64Vector, column: Int64Vector) -> Int64Vector:
        """The pieces that these columns are."""
        at = self._first_columns[stratum] + column
        return permuted(at, self.num_pieces, self.num_pieces, f"pieces/{self.seed}/{epoch}", None)

    def blocks(self, epoch: int, cells: Cells) -> Int64Vector:
        """The blocks that stand there; HOLE where none does."""
        pieces = self.pieces(epoch, cells.stratum, cells.column)
        size, key = self.piece_blocks, f"order/{self.seed}/{epoch}"
        inside = permuted(cells.row, size, size, key, pieces.astype(np.uint64))
        blocks = pieces * size + inside
        return np.where(blocks < self.num_blocks, blocks, HOLE)
