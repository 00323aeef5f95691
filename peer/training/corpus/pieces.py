"""A corpus in pieces: cut from a row of tokens, or read from files that have come one by one.

Files of pieces appear whole or not at all, and go whole: a piece that is being read stays readable
until the reader lets go of it. A piece is checked against the manifest when it is read first, so
that a disk that lies, or lost power, is noticed here and not in the weights.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from protocol.corpus.manifest import CorpusManifest

from .packed import InvalidCorpus
from .raw import Tokens

MAX_MAPPED_PIECES: Final = 256
"""Pieces that a trainer keeps mapped and need not check again."""


def piece_path(folder: Path, piece: int) -> Path:
    """The file of a piece."""
    return folder / f"{piece:08d}.piece"


def cut_piece(train: Tokens, manifest: CorpusManifest, piece: int) -> bytes:
    """A piece of a row of tokens."""
    start, end = manifest.tokens_of(piece)
    return train[start:end].astype(manifest.dtype).tobytes()


class PieceCorpus:
    """A corpus of which pieces come and go while it is trained on.

    Attributes:
        num_blocks: training blocks of an epoch.
        piece_blocks: of them in one piece.

    Args:
        held_out: blocks to validate with, [count, context_length + 1].
    """

    def __init__(self, folder: Path, manifest: CorpusManifest, held_out: npt.NDArray[Any]) -> None:
        self._folder = folder
        self._manifest = manifest
        self._held_out = held_out
        self._mapped: OrderedDict[int, Tokens] = OrderedDict()
        self.num_blocks = manifest.num_blocks
        self.piece_blocks = manifest.piece_blocks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mapped.clear()

    def missing(self, indices: npt.NDArray[np.int64]) -> tuple[int, ...]:
        """The pieces of these blocks that are not here."""
        pieces = np.unique(indices // self.piece_blocks).tolist()
        return tuple(piece for piece in pieces if self._piece(piece) is None)

    def blocks(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Training blocks: [count] indices to [count, context_length + 1] tokens.

        Raises:
            InvalidCorpus: a piece of theirs is not here; ask `missing` before.
        """
        length = self._manifest.context_length
        blocks = np.empty((len(indices), length + 1), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            piece, inside = divmod(index, self.piece_blocks)
            tokens = self._piece(piece)
            if tokens is None:
                raise InvalidCorpus(f"piece {piece} of the corpus is not here")
            blocks[row] = tokens[inside * length : (inside + 1) * length + 1]
        return blocks

    def validation_blocks(self, count: int) -> npt.NDArray[np.int64]:
        """The fixed validation blocks: [count, context_length + 1] tokens."""
        indices = np.arange(count, dtype=np.int64) * len(self._held_out) // count
        return self._held_out[indices].astype(np.int64)

    def _piece(self, piece: int) -> Tokens | None:
        tokens = self._mapped.get(piece)
        if tokens is None:
            tokens = self._read(piece)
            if tokens is None:
                return None
            self._mapped[piece] = tokens
            while len(self._mapped) > MAX_MAPPED_PIECES:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(piece)
        return tokens

    def _read(self, piece: int) -> Tokens | None:
        path = piece_path(self._folder, piece)
        try:
            mapped = np.memmap(path, dtype=self._manifest.dtype, mode="r")
        except (OSError, ValueError):  # not there, or empty
            return None
        return mapped if self._manifest.is_piece(piece, mapped.data.cast("B")) else None
