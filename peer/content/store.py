"""The pieces of a corpus on this machine: in one file, or one by one in a folder.

Files of pieces appear whole or not at all. What is read is checked against the manifest, and a
piece that is not what it should be is gone. Methods that touch the disk block: they run in `Work`.
"""

from pathlib import Path
from typing import Final

import numpy as np

from peer.ports.files import replace_file
from peer.training.corpus import Corpus, KeptCorpus
from peer.training.corpus.blocks import cut_piece, piece_path
from protocol.content.manifest import CorpusManifest

SUFFIX: Final = ".piece"


class PieceStore:
    """Pieces of one corpus.

    Attributes:
        here: which are here; bool [pieces].
        version: grows with each change of it; above 0.

    Args:
        folder: of files of pieces.
        whole: the corpus, where all of it is in one file, which is not ours to change.
    """

    def __init__(self, folder: Path, manifest: CorpusManifest, whole: Corpus | None = None) -> None:
        self.manifest = manifest
        self.version = 1
        self.here = np.full(manifest.num_pieces, whole is not None)
        self._folder = folder
        self._whole = whole
        for path in () if whole else folder.glob(f"*{SUFFIX}"):
            name = path.name.removesuffix(SUFFIX)
            if path.name.startswith("."):  # what was being written when the machine stopped
                path.unlink(missing_ok=True)
            elif name.isdecimal() and (piece := int(name)) < manifest.num_pieces:
                self.here[piece] = path.stat().st_size == manifest.piece_bytes(piece)

    def read(self, piece: int) -> bytes | None:
        """A piece, checked; None where it is not here, and from then on not in `here`."""
        if self._whole is not None:
            data = cut_piece(self._whole.train, self.manifest, piece)
            return data if self.manifest.is_piece(piece, data) else None
        try:
            data = piece_path(self._folder, piece).read_bytes()
            if self.manifest.is_piece(piece, data):
                return data
            self.drop(piece)
        except OSError:  # what cannot be read or removed now is not here; it may be written again
            self._note(piece, is_here=False)
        return None

    def add(self, piece: int, data: bytes) -> None:
        """Keep a piece, which has been checked, whole or not at all. Raises OSError."""
        replace_file(piece_path(self._folder, piece), data)
        self._note(piece, is_here=True)

    def drop(self, piece: int) -> None:
        """Remove its file; a trainer that reads it goes on doing so. Raises OSError."""
        if self._whole is None:
            piece_path(self._folder, piece).unlink(missing_ok=True)
            self._note(piece, is_here=False)

    def _note(self, piece: int, *, is_here: bool) -> None:
        self.here[piece] = is_here
        self.version += 1


def open_store(kept: KeptCorpus) -> PieceStore:
    """The pieces of a corpus of the cache. Raises InvalidCorpus."""
    corpus = kept.open()
    return PieceStore(kept.folder, kept.manifest, corpus if isinstance(corpus, Corpus) else None)
