"""The pieces of a corpus on this machine: in one file, or one by one in a folder.

Files of pieces appear whole or not at all. What is read is checked against the manifest, and a
piece that is not what it should be is gone. Methods that touch the disk block: they run in `Work`.
"""

from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from peer.ports.files import replacing
from peer.training.corpus import Corpus, KeptCorpus
from peer.training.corpus.blocks import cut_piece, piece_path
from protocol.content.manifest import CorpusManifest

SUFFIX: Final = ".piece"


class PieceStore(Protocol):
    """Pieces of one corpus.

    Attributes:
        here: which are here; bool [pieces].
        version: grows with each change of it; above 0.
    """

    manifest: CorpusManifest
    here: npt.NDArray[np.bool_]
    version: int

    def read(self, piece: int) -> bytes | None:
        """A piece, checked; None where it is not here, and from then on not in `here`."""

    def add(self, piece: int, data: bytes) -> None:
        """Keep a piece, which has been checked. Raises OSError."""

    def drop(self, piece: int) -> None:
        """Keep it no longer. Raises OSError."""


class WholeStore:
    """A corpus that is all in one file. Implements `PieceStore`."""

    def __init__(self, corpus: Corpus, manifest: CorpusManifest) -> None:
        self._corpus = corpus
        self.manifest = manifest
        self.here = np.ones(manifest.num_pieces, bool)
        self.version = 1

    def read(self, piece: int) -> bytes | None:
        """Cut from the file; what has changed there is not given to others."""
        data = cut_piece(self._corpus.train, self.manifest, piece)
        return data if self.manifest.is_piece(piece, data) else None

    def add(self, piece: int, data: bytes) -> None:
        """It is here already."""

    def drop(self, piece: int) -> None:
        """The file is not ours to change."""


class PieceFolder:
    """Pieces in files of their own. Implements `PieceStore`."""

    def __init__(self, folder: Path, manifest: CorpusManifest) -> None:
        self._folder = folder
        self.manifest = manifest
        self.here = np.zeros(manifest.num_pieces, bool)
        self.version = 1
        for path in folder.glob(f"*{SUFFIX}"):
            self._look_at(path)

    def read(self, piece: int) -> bytes | None:
        """From its file."""
        try:
            data = piece_path(self._folder, piece).read_bytes()
            if self.manifest.is_piece(piece, data):
                return data
            self.drop(piece)
        except OSError:  # what cannot be read or removed now is not here; it may be written again
            self._note(piece, is_here=False)
        return None

    def add(self, piece: int, data: bytes) -> None:
        """Write its file, whole or not at all."""
        with replacing(piece_path(self._folder, piece)) as out:
            out.write(data)
        self._note(piece, is_here=True)

    def drop(self, piece: int) -> None:
        """Remove its file; a trainer that reads it goes on doing so."""
        piece_path(self._folder, piece).unlink(missing_ok=True)
        self._note(piece, is_here=False)

    def _look_at(self, path: Path) -> None:
        name = path.name.removesuffix(SUFFIX)
        piece = int(name) if name.isdecimal() else -1
        if path.name.startswith("."):  # what was being written when the machine stopped
            path.unlink(missing_ok=True)
        elif 0 <= piece < self.manifest.num_pieces:
            self.here[piece] = path.stat().st_size == self.manifest.piece_bytes(piece)

    def _note(self, piece: int, *, is_here: bool) -> None:
        self.here[piece] = is_here
        self.version += 1


def open_store(kept: KeptCorpus) -> PieceStore:
    """The pieces of a corpus of the cache. Raises InvalidCorpus."""
    corpus = kept.open()
    if isinstance(corpus, Corpus):
        return WholeStore(corpus, kept.manifest)
    return PieceFolder(kept.folder, kept.manifest)
