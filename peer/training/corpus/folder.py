"""A corpus in the cache of a machine: a folder named by the manifest's digest, and its making.

manifest        protocol/content/manifest.py
held-out        the blocks that are validated with
tokens.bin      all tokens, in a packed file (packed.py), where this machine has made them; or
whole.json      where they are: a file of the user's, its size and when it was last changed; or
N.piece         pieces that have come from peers (blocks.py)
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import structs

from peer.runtime.files import replacing
from protocol.content.manifest import CorpusManifest, blob_name, digest_of, parse_manifest
from protocol.limits import MAX_BLOB_BYTES, MAX_PIECES
from protocol.run.run_spec import RunSpec, kind_of
from protocol.schedule.progress import Counting, Tell, nobody

from .blocks import Corpus, PieceCorpus, cut_piece, is_packed, open_file, without_marks
from .chats import CHAT, ChatTemplate, template_of
from .documents import DOCUMENT_KINDS, glob_texts, stdlib_texts
from .packed import (
    PART_BYTES,
    RAW_SUFFIXES,
    InvalidCorpus,
    Tokens,
    largest_token,
    pack,
    token_dtype,
    write_packed,
)
from .tokenise import PACKING, pack_documents
from .tokenizer import Tokenizer, load_tokenizer

MANIFEST: Final = "manifest"
HELD_OUT: Final = "held-out"
PACKED: Final = "tokens.bin"
WHOLE: Final = "whole.json"


def corpus_folder(cache_dir: Path, manifest_digest: str) -> Path:
    return cache_dir / f"corpus-{manifest_digest}"


@dataclass(frozen=True, slots=True)
class KeptCorpus:
    """A corpus of the cache; `whole` is the file of all tokens, None where it comes in pieces."""

    folder: Path
    manifest: CorpusManifest
    whole: Path | None

    @property
    def held_out(self) -> Path:
        return self.folder / HELD_OUT

    @property
    def manifest_digest(self) -> str:
        return self.folder.name.removeprefix("corpus-")

    @property
    def blobs(self) -> dict[str, Path]:
        """Files that peers ask for by digest before they have any piece."""
        return {
            self.manifest_digest: self.folder / MANIFEST,
            self.manifest.held_out: self.held_out,
        }

    @property
    def has_conversations(self) -> bool:
        """Whether some tokens are given, and no targets (chats.py)."""
        return bool((self.open().validation_blocks(self.manifest.held_out_blocks) < 0).any())

    def open(self) -> Corpus | PieceCorpus:
        made_of = self.manifest
        if self.whole is not None:
            return open_file(
                self.whole, made_of.context_length, made_of.held_out_blocks, made_of.piece_blocks
            )
        shape = (made_of.held_out_blocks, made_of.context_length + 1)
        held_out = np.fromfile(self.held_out, made_of.dtype).reshape(shape)
        return PieceCorpus(self.folder, made_of, held_out)


def adopt_manifest(data: bytes, manifest_digest: str, cache_dir: Path) -> KeptCorpus:
    """Keep the manifest of a corpus that comes in pieces. Raises InvalidCorpus."""
    if blob_name(data) != manifest_digest:
        raise InvalidCorpus(f"the manifest received has not the digest {manifest_digest}")
    try:
        manifest = parse_manifest(data)
    except ValueError as error:
        raise InvalidCorpus(f"the corpus's manifest cannot be read: {error}") from error
    return _keep(cache_dir, manifest)


def adopt_held_out(kept: KeptCorpus, data: bytes) -> None:
    """Keep the held-out blocks. Raises InvalidCorpus where the manifest has others."""
    if blob_name(data) != kept.manifest.held_out or len(data) != kept.manifest.held_out_bytes:
        raise InvalidCorpus("what is held out of the corpus does not match its manifest")
    with replacing(kept.held_out) as out:
        out.write(data)


def kept_corpus(cache_dir: Path, manifest_digest: str) -> KeptCorpus | None:
    """The corpus of this digest; None without manifest or held-out blocks."""
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
    """The file of all tokens, if there is one and it has not changed."""
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


def prepare_corpus(
    spec: RunSpec, cache_dir: Path, source: str | None = None, tell: Tell = nobody
) -> KeptCorpus:
    """Make the corpus of a run from its texts, whole, in `cache_dir`.

    Args:
        source: of this machine's own data: like `data.source`, or a file of tokens.
        tell: ends it by what it raises.

    Raises:
        InvalidCorpus: there is no such data, or too little of it.
        OSError: a text cannot be read, or the cache not be written.
        ValueError: the tokenizer cannot be read.
    """
    kind, _ = kind_of(source or spec.data.source)
    tokenizer = load_tokenizer(spec.data.tokenizer)
    replay = spec.data.replay
    if source is not None and kind == "tokens":
        replay = None  # it is the corpus, made elsewhere
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=PACKING, dir=cache_dir) as folder:
        made = partial(_tokens_of, spec=spec, tokenizer=tokenizer, cache_dir=cache_dir, tell=tell)
        tokens = made(source or spec.data.source, Path(folder) / "corpus")
        if replay is not None:
            old = made(replay, Path(folder) / "replay")
            tokens = _mixed(tokens, old, Path(folder) / "mixed", spec, tokenizer, tell)
        is_ours = tokens.parent == Path(folder)
        return _kept(spec, tokens, tokenizer, cache_dir, tell, is_ours=is_ours)


def _tokens_of(
    source: str, packed: Path, *, spec: RunSpec, tokenizer: Tokenizer, cache_dir: Path, tell: Tell
) -> Path:
    """The file of a source's tokens: the user's, or `packed`, which is made."""
    kind, where = kind_of(source)
    if kind == "tokens":
        path = Path(where).expanduser().absolute()
        if not (path.is_file() and is_packed(path)):
            _check_tokens(path, tokenizer, tell)
        return path
    if kind in DOCUMENT_KINDS:
        chat = _template(spec) if kind == CHAT else None
        pack_documents(kind, where, tokenizer, cache_dir, packed, tell, chat)
    else:
        texts = stdlib_texts() if kind == "stdlib" else glob_texts(where)
        pack(texts, tokenizer, packed, tell)
    return packed


def _mixed(
    new: Path, old: Path, out_path: Path, spec: RunSpec, tokenizer: Tokenizer, tell: Tell
) -> Path:
    """A packed file of new tokens, and of as many old ones as are their share.

    Old blocks are taken evenly from all there are, again where they are too few. What is held out
    is of both by the same share; there the old ones come last, since blocks at even distances are
    validated with.
    """
    length, share = spec.model.context_length, spec.data.replay_share
    both = [open_file(path, length, spec.data.validation_blocks) for path in (new, old)]
    for path, each in zip((new, old), both, strict=True):
        _check_tokenizer(path, each, tokenizer)
    # Marks of conversations take room: a packed file has the type that its tokens need.
    dtypes = [each.train.dtype for each in both if each.tokenizer_digest is not None]
    dtype = max([token_dtype(tokenizer.vocabulary_size), *dtypes], key=lambda each: each.itemsize)
    ratio = share / (1 - share)
    with (
        tempfile.TemporaryFile(dir=out_path.parent) as train,
        tempfile.TemporaryFile(dir=out_path.parent) as held_out,
    ):
        order = partial(_among, ratio=ratio)
        for part, file, put in (("train", train, order), ("held_out", held_out, chain)):
            fresh, known = (np.asarray(getattr(each, part)) for each in both)
            all_new = (fresh[at : at + length] for at in range(0, len(fresh), length))
            replayed = _spread(known, len(fresh) * ratio, length)
            file.writelines(each.astype(dtype).tobytes() for each in put(all_new, replayed))
        sizes_bytes = train.tell(), held_out.tell()
        write_packed(out_path, tokenizer, sizes_bytes, (train, held_out), tell, dtype=dtype)
    return out_path


def _among(new: Iterable[Tokens], old: Iterator[Tokens], ratio: float) -> Iterator[Tokens]:
    """Old blocks between new ones: a peer trains few pieces, and each is to have its share."""
    for number, block in enumerate(new):
        yield block
        yield from islice(old, int((number + 1) * ratio) - int(number * ratio))
    yield from old


def _spread(tokens: Tokens, wanted: float, length: int) -> Iterator[Tokens]:
    """Blocks with the wanted number of tokens together, evenly from all of them."""
    count = max(1, round(wanted / length))
    for number in range(count):
        start = number * max(0, len(tokens) - length) // max(1, count - 1)
        yield tokens[start : start + length]


def document_end(spec: RunSpec, kept: KeptCorpus) -> int:
    """The token behind each text of a corpus. Raises InvalidCorpus where there is none."""
    corpus, ends = kept.open(), load_tokenizer(spec.data.tokenizer).separator
    assert isinstance(corpus, Corpus), "whoever makes a corpus has it whole"
    if kept.has_conversations:
        raise InvalidCorpus(
            "it holds conversations, whose turns may end with the token that ends a document: leave"
            " data.mask_documents out"
        )
    parts = range(0, len(corpus.train), PART_BYTES)
    if not ends or not any((corpus.train[at : at + PART_BYTES] == ends[0]).any() for at in parts):
        raise InvalidCorpus(
            "with data.mask_documents attention ends where a document does, and no text of this"
            f" corpus is followed by {'the token' if ends else 'a token'} that ends one: leave the"
            " key out, or take a tokenizer that has an end of text"
        )
    return int(ends[0])


def _template(spec: RunSpec) -> ChatTemplate:
    own = spec.data.chat_template or template_of(spec.data.tokenizer, spec.model.init_from)
    return ChatTemplate(own)


def describe_corpus(spec: RunSpec, kept: KeptCorpus) -> KeptCorpus:
    """The corpus itself. Raises InvalidCorpus where it does not fit the run spec."""
    manifest = kept.manifest
    sizes = (manifest.context_length, manifest.held_out_blocks)
    if sizes != (spec.model.context_length, spec.data.validation_blocks):
        raise InvalidCorpus("the corpus that the run spec names was cut for another run spec")
    return kept


def _kept(
    spec: RunSpec,
    tokens: Path,
    tokenizer: Tokenizer,
    cache_dir: Path,
    tell: Tell,
    *,
    is_ours: bool = False,
) -> KeptCorpus:
    """Keep the corpus of a file, which is moved into the cache where it `is_ours`."""
    corpus = open_file(tokens, spec.model.context_length, spec.data.validation_blocks)
    _check_tokenizer(tokens, corpus, tokenizer)
    held_out = corpus.validation_blocks(spec.data.validation_blocks)
    if (held_out[:, 1:] < 0).all():
        raise InvalidCorpus(
            f"no answer is in the {len(held_out)} blocks of {spec.model.context_length} tokens that"
            " are held out, so no loss could be measured: raise data.validation_blocks or"
            " model.context_length"
        )
    is_packed_here = corpus.tokenizer_digest is not None
    dtype = corpus.train.dtype if is_packed_here else token_dtype(tokenizer.vocabulary_size)
    blob = without_marks(held_out, tokenizer.vocabulary_size).astype(dtype).tobytes()
    kept = _keep(cache_dir, _manifest(spec, corpus, tokenizer, blob, dtype, tell))
    if is_ours:
        tokens = tokens.replace(kept.folder / PACKED)
    else:
        status = tokens.stat()
        told = {"path": str(tokens), "bytes": status.st_size, "changed_ns": status.st_mtime_ns}
        with replacing(kept.folder / WHOLE) as out:
            out.write(json.dumps(told).encode())
    adopt_held_out(kept, blob)
    return replace(kept, whole=tokens)


def _manifest(
    spec: RunSpec,
    corpus: Corpus,
    tokenizer: Tokenizer,
    held_out: bytes,
    dtype: np.dtype[Any],
    tell: Tell,
) -> CorpusManifest:
    """The manifest of a corpus, all of which is read. Raises InvalidCorpus."""
    if len(held_out) > MAX_BLOB_BYTES:
        raise InvalidCorpus(
            f"data.validation_blocks would hold out {len(held_out)} bytes, which every peer has to"
            f" fetch; at most {MAX_BLOB_BYTES} can be: use fewer"
        )
    block_bytes = spec.model.context_length * dtype.itemsize
    manifest = CorpusManifest(
        context_length=spec.model.context_length,
        piece_blocks=max(1, spec.data.piece_kib * 1024 // block_bytes),
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
    digests, pieces = [], range(manifest.num_pieces)
    hashing = Counting(tell, "hashing", sum(map(manifest.piece_bytes, pieces)))
    for piece in pieces:
        digests.append(digest_of(data := cut_piece(corpus.train, manifest, piece)))
        hashing.add(len(data))
    return structs.replace(manifest, digests=b"".join(digests))


def _check_tokenizer(path: Path, corpus: Corpus, tokenizer: Tokenizer) -> None:
    if corpus.tokenizer_digest not in (None, tokenizer.digest):
        raise InvalidCorpus(f"{path} was made with another tokenizer than data.tokenizer")


def _check_tokens(path: Path, tokenizer: Tokenizer, tell: Tell) -> None:
    if path.suffix not in RAW_SUFFIXES:
        raise InvalidCorpus(f"tokens:{path} must be a file of type {' or '.join(RAW_SUFFIXES)}")
    if not path.is_file():
        raise InvalidCorpus(f"tokens:{path}: there is no such file")
    largest = largest_token(path, tell)
    if largest >= tokenizer.vocabulary_size:
        raise InvalidCorpus(
            f"{path} holds token {largest}, the tokenizer has {tokenizer.vocabulary_size}: "
            "set data.tokenizer to the one the file was made with"
        )
