"""Where a machine keeps a corpus: a folder of the cache, named by the manifest's digest.

manifest        protocol/content/manifest.py
held-out        the blocks that are validated with
tokens.bin      all tokens, in a packed file (packed.py), where this machine has made them; or
whole.json      where they are: a file of the user's, its size and when it was last changed; or
N.piece         pieces that have come from peers (blocks.py)
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from peer.ports.files import replacing
from protocol.content.manifest import CorpusManifest, blob_name, parse_manifest

from .blocks import Corpus, PieceCorpus, open_file
from .packed import InvalidCorpus

MANIFEST: Final = "manifest"
HELD_OUT: Final = "held-out"
PACKED: Final = "tokens.bin"
WHOLE: Final = "whole.json"


def corpus_folder(cache_dir: Path, manifest_digest: str) -> Path:
    """Where a corpus of this digest is kept."""
    return cache_dir / f"corpus-{manifest_digest}"


@dataclass(frozen=True, slots=True)
class KeptCorpus:
    """A corpus of the cache.

    Attributes:
        whole: the file that holds all tokens; None where it comes in pieces.
    """

    folder: Path
    manifest: CorpusManifest
    whole: Path | None

    @property
    def held_out(self) -> Path:
        """The blob of what is validated with."""
        return self.folder / HELD_OUT

    def open(self) -> Corpus | PieceCorpus:
        """Open it for the trainer. Raises InvalidCorpus."""
        made_of = self.manifest
        if self.whole is not None:
            return open_file(
                self.whole, made_of.context_length, made_of.held_out_blocks, made_of.piece_blocks
            )
        shape = (made_of.held_out_blocks, made_of.context_length + 1)
        held_out = np.fromfile(self.held_out, made_of.dtype).reshape(shape)
        return PieceCorpus(self.folder, made_of, held_out)


def keep_whole(
    cache_dir: Path, manifest: CorpusManifest, held_out: bytes, tokens: Path
) -> KeptCorpus:
    """Keep a corpus whose tokens are all in one file, which goes on lying where it is."""
    kept = _keep(cache_dir, manifest)
    adopt_held_out(kept, held_out)
    if tokens != kept.folder / PACKED:
        status = tokens.stat()
        told = {"path": str(tokens), "bytes": status.st_size, "changed_ns": status.st_mtime_ns}
        with replacing(kept.folder / WHOLE) as out:
            out.write(json.dumps(told).encode())
    return KeptCorpus(kept.folder, manifest, tokens)


def adopt_manifest(data: bytes, manifest_digest: str, cache_dir: Path) -> KeptCorpus:
    """Keep the manifest of a corpus that comes in pieces.

    Raises:
        InvalidCorpus: it is not the one of this digest, or no manifest.
    """
    if blob_name(data) != manifest_digest:
        raise InvalidCorpus(f"the manifest received has not the digest {manifest_digest}")
    try:
        manifest = parse_manifest(data)
    except ValueError as error:
        raise InvalidCorpus(f"the corpus's manifest cannot be read: {error}") from error
    return _keep(cache_dir, manifest)


def adopt_held_out(kept: KeptCorpus, data: bytes) -> None:
    """Keep the blob of what is held out. Raises InvalidCorpus: it is another."""
    if blob_name(data) != kept.manifest.held_out or len(data) != kept.manifest.held_out_bytes:
        raise InvalidCorpus("what is held out of the corpus does not match its manifest")
    with replacing(kept.held_out) as out:
        out.write(data)


def kept_corpus(cache_dir: Path, manifest_digest: str) -> KeptCorpus | None:
    """The corpus of this digest, as far as it is here; None without manifest or held-out blocks."""
    folder = corpus_folder(cache_dir, manifest_digest)
    try:
        data, held_out = (folder / MANIFEST).read_bytes(), (folder / HELD_OUT).read_bytes()
        manifest = parse_manifest(data)
    except (OSError, ValueError):
        return None
    if blob_name(data) != manifest_digest or blob_name(held_out) != manifest.held_out:
        return None
    return KeptCorpus(folder, manifest, _whole_file(folder))


def open_corpus(path: Path, context_length: int, validation_blocks: int) -> Corpus | PieceCorpus:
    """Open a folder of the cache, or a file of tokens, for the trainer. Raises InvalidCorpus."""
    if not path.is_dir():
        return open_file(path, context_length, validation_blocks)
    kept = kept_corpus(path.parent, path.name.removeprefix("corpus-"))
    if kept is None or kept.manifest.context_length != context_length:
        raise InvalidCorpus(f"{path} holds no corpus of blocks of {context_length} tokens")
    return kept.open()


def _keep(cache_dir: Path, manifest: CorpusManifest) -> KeptCorpus:
    folder = corpus_folder(cache_dir, manifest.name)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / MANIFEST) as out:
        out.write(manifest.to_bytes())
    return KeptCorpus(folder, manifest, None)


def _whole_file(folder: Path) -> Path | None:
    """The file of all tokens, if there is one, and it is what it was when it was read."""
    packed = folder / PACKED
    if packed.is_file():
        return packed
    try:
        told = json.loads((folder / WHOLE).read_bytes())
        status = Path(told["path"]).stat()
        is_as_it_was = (status.st_size, status.st_mtime_ns) == (told["bytes"], told["changed_ns"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Path(told["path"]) if is_as_it_was else None
