"""From a run spec to a corpus in the cache, and the checks of one that came from elsewhere."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from protocol.content.manifest import MAX_PIECES, CorpusManifest, blob_name, digest_of
from protocol.limits import MAX_BLOB_BYTES
from protocol.run.run_spec import RunSpec

from .blocks import Corpus, cut_piece, open_file
from .documents import KINDS as DOCUMENT_KINDS
from .documents import glob_texts, stdlib_texts
from .folder import MANIFEST, PACKED, KeptCorpus, corpus_folder, keep_whole
from .packed import (
    MAGIC,
    RAW_SUFFIXES,
    Check,
    InvalidCorpus,
    go_on,
    largest_token,
    pack,
    token_dtype,
)
from .tokenise import PACKING, pack_documents
from .tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class PreparedCorpus:
    """A corpus of the cache that is ready for the trainer."""

    kept: KeptCorpus

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.kept.folder

    @property
    def manifest_digest(self) -> str:
        """Its name in the run spec: 32 hex digits."""
        return self.kept.folder.name.removeprefix("corpus-")

    @property
    def vocabulary_size(self) -> int:
        """Tokens that there are; rows of the embedding."""
        return self.kept.manifest.vocabulary_size

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer's file (32 hex digits), or `bytes`."""
        return self.kept.manifest.tokenizer_digest

    @property
    def num_blocks(self) -> int:
        """Training blocks of an epoch."""
        return self.kept.manifest.num_blocks

    @property
    def blobs(self) -> dict[str, Path]:
        """What peers ask for by digest before they have any piece, and the files of it."""
        kept = self.kept
        return {
            self.manifest_digest: kept.folder / MANIFEST,
            kept.manifest.held_out: kept.held_out,
        }


def prepare_corpus(
    spec: RunSpec, cache_dir: Path, source: str | None = None, check: Check = go_on
) -> PreparedCorpus:
    """Make the corpus of a run from its texts, whole, in `cache_dir`.

    Args:
        source: where this machine has the data, when not where the run spec says: like
            `data.source`, or a file of tokens.
        check: ends it by what it raises.

    Raises:
        InvalidCorpus: there is no such data, or too little of it.
        OSError: a text cannot be read, or the cache not be written.
        ValueError: the tokenizer cannot be read.
    """
    kind, where = _kind_of(source or spec.data.source)
    tokenizer = load_tokenizer(spec.data.tokenizer)
    if kind == "tokens":
        path = Path(where).expanduser().absolute()
        if not _is_packed(path):
            _check_tokens(path, tokenizer, check)
        return _kept(spec, path, tokenizer, cache_dir, check)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=PACKING, dir=cache_dir) as folder:
        packed = Path(folder) / "corpus"
        if kind in DOCUMENT_KINDS:
            pack_documents(kind, where, tokenizer, cache_dir, packed, check)
        else:
            texts = stdlib_texts() if kind == "stdlib" else glob_texts(where)
            pack(texts, tokenizer, packed, check)
        return _kept(spec, packed, tokenizer, cache_dir, check, is_ours=True)


def describe_corpus(spec: RunSpec, kept: KeptCorpus) -> PreparedCorpus:
    """A corpus of the cache, on a machine that need not have made it.

    Raises:
        InvalidCorpus: it does not fit the run spec.
    """
    manifest = kept.manifest
    sizes = (manifest.context_length, manifest.held_out_blocks)
    if sizes != (spec.model.context_length, spec.data.validation_blocks):
        raise InvalidCorpus("the corpus that the run spec names was cut for another run spec")
    return PreparedCorpus(kept)


def piece_blocks_of(spec: RunSpec, token_bytes: int) -> int:
    """Blocks of one piece."""
    return max(1, spec.data.piece_kib * 1024 // (spec.model.context_length * token_bytes))


def _kind_of(source: str) -> tuple[str, str]:
    """`text:GLOB` to its parts; what names no kind is a file of tokens."""
    kind, colon, where = source.partition(":")
    if kind == "stdlib" or (colon and kind in ("text", "tokens", *DOCUMENT_KINDS)):
        return kind, where
    return "tokens", source


def _kept(
    spec: RunSpec,
    tokens: Path,
    tokenizer: Tokenizer,
    cache_dir: Path,
    check: Check,
    *,
    is_ours: bool = False,
) -> PreparedCorpus:
    """Keep the corpus of a file.

    Args:
        is_ours: the file may be moved into the cache.
    """
    with open_file(tokens, spec.model.context_length, spec.data.validation_blocks) as corpus:
        if corpus.tokenizer_digest not in (None, tokenizer.digest):
            raise InvalidCorpus(f"{tokens} was made with another tokenizer than data.tokenizer")
        held_out = corpus.validation_blocks(spec.data.validation_blocks)
        dtype = token_dtype(tokenizer.vocabulary_size)
        blob = held_out.astype(dtype).tobytes()
        manifest = _manifest(spec, corpus, tokenizer, blob, check)
    folder = corpus_folder(cache_dir, manifest.name)
    if is_ours:
        folder.mkdir(parents=True, exist_ok=True)
        tokens = tokens.replace(folder / PACKED)
    return PreparedCorpus(keep_whole(cache_dir, manifest, blob, tokens))


def _manifest(
    spec: RunSpec, corpus: Corpus, tokenizer: Tokenizer, held_out: bytes, check: Check
) -> CorpusManifest:
    """The manifest of a row of tokens: all of it is read. Raises InvalidCorpus."""
    if len(held_out) > MAX_BLOB_BYTES:
        raise InvalidCorpus(
            f"data.validation_blocks would hold out {len(held_out)} bytes, which every peer has to"
            f" fetch; at most {MAX_BLOB_BYTES} can be: use fewer"
        )
    dtype = token_dtype(tokenizer.vocabulary_size)
    manifest = CorpusManifest(
        context_length=spec.model.context_length,
        piece_blocks=piece_blocks_of(spec, dtype.itemsize),
        num_tokens=len(corpus.train),
        dtype=dtype.str,
        vocabulary_size=tokenizer.vocabulary_size,
        tokenizer_digest=tokenizer.digest,
        held_out_blocks=spec.data.validation_blocks,
        held_out=blob_name(held_out),
        digests=b"",
    )
    if manifest.num_pieces > MAX_PIECES:
        raise InvalidCorpus(
            f"{manifest.num_pieces} pieces; at most {MAX_PIECES} can be: raise data.piece_kib"
        )
    digests = []
    for piece in range(manifest.num_pieces):
        check()
        digests.append(digest_of(cut_piece(corpus.train, manifest, piece)))
    return manifest.with_digests(b"".join(digests))


def _is_packed(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _check_tokens(path: Path, tokenizer: Tokenizer, check: Check) -> None:
    if path.suffix not in RAW_SUFFIXES:
        raise InvalidCorpus(f"tokens:{path} must be a file of type {' or '.join(RAW_SUFFIXES)}")
    if not path.is_file():
        raise InvalidCorpus(f"tokens:{path}: there is no such file")
    largest = largest_token(path, check)
    if largest >= tokenizer.vocabulary_size:
        raise InvalidCorpus(
            f"{path} holds token {largest}, the tokenizer has {tokenizer.vocabulary_size}: "
            "set data.tokenizer to the one the file was made with"
        )
