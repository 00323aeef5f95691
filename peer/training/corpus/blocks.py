"""A corpus as the trainer sees it: numbered blocks of context_length + 1 tokens.

Training block i starts at token i * context_length: neighbours share one token, the last target of
one and the first input of the other, so every token is predicted once per epoch. The validation
blocks are spread evenly over the held-out tokens: the same on every peer.

A corpus lies in one file, or in pieces. Files of pieces appear and go whole; a piece that is mapped
stays readable. A piece is checked against the manifest when it is first read, so that a disk that
lies, or lost power, is noticed here and not in the weights.

A token that is given, and no target (chats.py), is kept as its number and the size of the
vocabulary, and handed out as ~number: a negative one.
"""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from protocol.content.manifest import CorpusManifest

from .packed import MAGIC, InvalidCorpus, Tokens, map_tokens, read_header

MAX_MAPPED_PIECES: Final = 256
"""Pieces that a trainer keeps mapped and need not check again."""
PIECE_SUFFIX: Final = ".piece"


def piece_path(folder: Path, piece: int) -> Path:
    return folder / f"{piece:08d}{PIECE_SUFFIX}"


def cut_piece(train: Tokens, manifest: CorpusManifest, piece: int) -> bytes:
    start, end = manifest.tokens_of(piece)
    return train[start:end].astype(manifest.dtype).tobytes()


Blocks = npt.NDArray[np.int64]


def _marked(blocks: Blocks, vocabulary_size: int) -> Blocks:
    return np.where(blocks < vocabulary_size, blocks, vocabulary_size - 1 - blocks)


def without_marks(blocks: Blocks, vocabulary_size: int) -> Blocks:
    """Blocks as they are kept."""
    return np.where(blocks >= 0, blocks, vocabulary_size - 1 - blocks)


class PieceCorpus:
    """A corpus of which pieces come and go; held-out blocks are [count, context_length + 1]."""

    def __init__(self, folder: Path, manifest: CorpusManifest, held_out: npt.NDArray[Any]) -> None:
        self._folder = folder
        self._manifest = manifest
        self._held_out = held_out
        self._mapped: OrderedDict[int, Tokens] = OrderedDict()
        self.num_blocks = manifest.num_blocks
        self.piece_blocks = manifest.piece_blocks

    def missing(self, indices: npt.NDArray[np.int64]) -> tuple[int, ...]:
        """Pieces of these blocks that are not here."""
        pieces = np.unique(indices // self.piece_blocks).tolist()
        return tuple(piece for piece in pieces if self._piece(piece) is None)

    def blocks(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[count] indices to [count, context_length + 1] tokens. Raises InvalidCorpus."""
        length = self._manifest.context_length
        blocks = np.empty((len(indices), length + 1), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            piece, inside = divmod(index, self.piece_blocks)
            tokens = self._piece(piece)
            if tokens is None:
                raise InvalidCorpus(f"piece {piece} of the corpus is not here")
            blocks[row] = tokens[inside * length : (inside + 1) * length + 1]
        return _marked(blocks, self._manifest.vocabulary_size)

    def validation_blocks(self, count: int) -> npt.NDArray[np.int64]:
        """The fixed validation blocks: [count, context_length + 1] tokens."""
        indices = np.arange(count, dtype=np.int64) * len(self._held_out) // count
        blocks = self._held_out[indices].astype(np.int64)
        return _marked(blocks, self._manifest.vocabulary_size)

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


@dataclass(eq=False)
class Corpus:
    """A mapped corpus file.

    Attributes:
        train: tokens to train on; `held_out` are those to validate with.
        piece_blocks: None where they are not known.
        tokenizer_digest, vocabulary_size: of a packed corpus; None for a raw token file.
    """

    train: Tokens
    held_out: Tokens
    _context_length: int
    tokenizer_digest: str | None = None
    vocabulary_size: int | None = None
    piece_blocks: int | None = None

    @property
    def num_blocks(self) -> int:
        """Training blocks of an epoch."""
        return (len(self.train) - 1) // self._context_length

    @property
    def held_out_blocks(self) -> int:
        return max(0, (len(self.held_out) - 1) // self._context_length)

    def missing(self, indices: npt.NDArray[np.int64]) -> tuple[int, ...]:
        return ()

    def blocks(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Training blocks: [count] indices to [count, context_length + 1] tokens."""
        return self._cut(self.train, indices * self._context_length)

    def validation_blocks(self, count: int) -> npt.NDArray[np.int64]:
        """The fixed validation blocks: [count, context_length + 1] tokens."""
        indices = np.arange(count, dtype=np.int64) * self.held_out_blocks // count
        return self._cut(self.held_out, indices * self._context_length)

    def _cut(self, tokens: Tokens, starts: Blocks) -> Blocks:
        blocks = np.empty((len(starts), self._context_length + 1), dtype=np.int64)
        for row, start in enumerate(starts):
            blocks[row] = tokens[start : start + self._context_length + 1]
        return blocks if self.vocabulary_size is None else _marked(blocks, self.vocabulary_size)


def open_file(
    path: Path, context_length: int, validation_blocks: int, piece_blocks: int | None = None
) -> Corpus:
    """Map a packed corpus, or a raw token file whose end is held out. Raises InvalidCorpus."""
    if is_packed(path):
        corpus = _open_packed(path, context_length, piece_blocks)
    else:
        tokens = map_tokens(path)
        split = max(0, len(tokens) - validation_blocks * context_length - 1)
        corpus = Corpus(tokens[:split], tokens[split:], context_length, piece_blocks=piece_blocks)
    available = corpus.held_out_blocks
    if corpus.num_blocks < 1 or available < validation_blocks:
        raise InvalidCorpus(
            f"{path} has {max(0, corpus.num_blocks)} blocks of {context_length} tokens to train on "
            f"and {available} held out; data.validation_blocks is {validation_blocks}: "
            "use more text or fewer blocks"
        )
    return corpus


def is_packed(path: Path) -> bool:
    """Raises InvalidCorpus where the file cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise InvalidCorpus(f"cannot read {path}: {error.strerror}") from error


def _open_packed(path: Path, context_length: int, piece_blocks: int | None) -> Corpus:
    header, offset = read_header(path)
    count = header.train_tokens + header.validation_tokens
    if not count:
        raise InvalidCorpus(f"{path} holds no tokens")
    tokens = np.memmap(path, dtype=header.dtype, mode="r", offset=offset, shape=(count,))
    return Corpus(
        tokens[: header.train_tokens],
        tokens[header.train_tokens :],
        context_length,
        tokenizer_digest=header.tokenizer_digest,
        vocabulary_size=header.vocabulary_size,
        piece_blocks=piece_blocks,
    )
