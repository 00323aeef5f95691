"""From a run spec to a corpus file, and the checks of one that came from elsewhere."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import blake3

from protocol.run.run_spec import RunSpec

from ..tokenizer import Tokenizer, load_tokenizer
from .blocks import open_corpus
from .packed import InvalidCorpus, pack, replacing
from .raw import RAW_SUFFIXES, largest_token
from .sources import glob_texts, stdlib_texts


@dataclass(frozen=True, slots=True)
class PreparedCorpus:
    """A corpus file that is ready for the trainer.

    Attributes:
        manifest_digest: blake3 of the file: 32 hex digits.
        vocabulary_size: of the tokenizer; rows of the embedding.
        tokenizer_digest: of the tokenizer's file (32 hex digits), or `bytes`.
        num_blocks: training blocks of an epoch.
    """

    manifest_digest: str
    path: Path
    vocabulary_size: int
    tokenizer_digest: str
    num_blocks: int


def prepare_corpus(spec: RunSpec, cache_dir: Path, source: str | None = None) -> PreparedCorpus:
    """Make the corpus file of a run from its texts; done once, then found in `cache_dir`.

    Args:
        source: where this machine has the data, when not where the run spec says.

    Raises:
        InvalidCorpus: there is no such data, or too little of it.
        ValueError: the tokenizer cannot be read.
    """
    kind, _, where = (source or spec.data.source).partition(":")
    tokenizer = load_tokenizer(spec.data.tokenizer)
    if kind == "tokens":
        path = Path(where).expanduser().absolute()
        _check_tokens(path, tokenizer)
        return _described(spec, path, corpus_digest(path), tokenizer)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".packing-", dir=cache_dir) as folder:
        packed = Path(folder) / "corpus"
        texts = stdlib_texts() if kind == "stdlib" else glob_texts(where)
        pack(texts, tokenizer, packed)
        digest = corpus_digest(packed)
        path = corpus_path(cache_dir, digest)
        packed.replace(path)
    return _described(spec, path, digest, tokenizer)


def adopt_corpus(data: bytes | memoryview, manifest_digest: str, cache_dir: Path) -> Path:
    """Keep a packed corpus that came from a peer.

    Raises:
        InvalidCorpus: it is not the one of this digest.
    """
    found = blake3.blake3(data).hexdigest(length=16)
    if found != manifest_digest:
        raise InvalidCorpus(f"the corpus received has digest {found}, not {manifest_digest}")
    cache_dir.mkdir(parents=True, exist_ok=True)
    path = corpus_path(cache_dir, manifest_digest)
    with replacing(path) as out:
        out.write(data)
    return path


def verify_corpus(path: Path, manifest_digest: str) -> None:
    """Raises InvalidCorpus unless the file is the corpus of this digest."""
    found = corpus_digest(path)
    if found != manifest_digest:
        raise InvalidCorpus(f"{path} has digest {found}, the run needs {manifest_digest}")


def describe_corpus(spec: RunSpec, path: Path) -> PreparedCorpus:
    """What a verified corpus file holds, on a machine that did not make it.

    Raises:
        InvalidCorpus: too few blocks for the run spec, or another tokenizer's.
        ValueError: a `tokens:` corpus, and its tokenizer cannot be read.
    """
    with open_corpus(path, spec.model.context_length, spec.data.validation_blocks) as corpus:
        digest, size = corpus.tokenizer_digest, corpus.vocabulary_size
        num_blocks = corpus.num_blocks
    if size is None or digest is None:
        tokenizer = load_tokenizer(spec.data.tokenizer)
        digest, size = tokenizer.digest, tokenizer.vocabulary_size
    return PreparedCorpus(corpus_digest(path), path, size, digest, num_blocks)


def corpus_path(cache_dir: Path, manifest_digest: str) -> Path:
    """Where a corpus of this digest is kept."""
    return cache_dir / f"corpus-{manifest_digest}.bin"


def corpus_digest(path: Path) -> str:
    """Digest of a corpus file: 32 hex digits. Raises InvalidCorpus when it is not there."""
    try:
        return blake3.blake3().update_mmap(path).hexdigest(length=16)
    except OSError as error:
        raise InvalidCorpus(f"cannot read {path}: {error.strerror}") from error


def _check_tokens(path: Path, tokenizer: Tokenizer) -> None:
    if not path.is_file() or path.suffix not in RAW_SUFFIXES:
        raise InvalidCorpus(f"tokens:{path} must be a file of type {' or '.join(RAW_SUFFIXES)}")
    largest = largest_token(path)
    if largest >= tokenizer.vocabulary_size:
        raise InvalidCorpus(
            f"{path} holds token {largest}, the tokenizer has {tokenizer.vocabulary_size}: "
            "set data.tokenizer to the one the file was made with"
        )


def _described(spec: RunSpec, path: Path, digest: str, tokenizer: Tokenizer) -> PreparedCorpus:
    with open_corpus(path, spec.model.context_length, spec.data.validation_blocks) as corpus:
        num_blocks = corpus.num_blocks
    return PreparedCorpus(digest, path, tokenizer.vocabulary_size, tokenizer.digest, num_blocks)
