"""Tokenising a data set: shard by shard, each kept when it is done.

    tokens-<key>/N.train, N.held-out     key: of tokenizer and shards, by name and identity
    tokens-<key>/.N.train.*, ...         drafts, of the shard that is being tokenised

The tokens of a shard go to two files, to train on and held out. Both get their names when they are
whole and on disk, so a shard stays done when the machine stops, or another run needs the same data
set. A draft that was left behind is useless. In the end the shards are put together in order, into
one packed file (packed.py).

A token of a conversation that is given, and no target (chats.py), is kept as its number and the
size of the vocabulary.

Documents are tokenised some at a time: the library spreads them over all cores.

One document in HELD_OUT_OF of the first HELD_OUT_ROWS of each shard is held out, by the hash of its
place.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

import blake3
import numpy as np

from peer.runtime.files import replacing
from protocol.schedule.progress import BYTES, TaskProgress, Tell

from .chats import ChatTemplate, Passage
from .documents import Shard, ShardRead, documents, shards_of, text_passage
from .packed import HELD_OUT_OF, PART_BYTES, InvalidCorpus, token_dtype, write_packed
from .tokenizer import Tokenizer, Tokens

HELD_OUT_ROWS: Final = 10_000
PACKING: Final = ".packing-"
"""Begins the name of a folder in which a corpus is put together."""
Numbered = tuple[int, list[Passage]]
"""A document, with its number in the shard."""
Reached = Callable[[float], None]
"""Takes the share of a shard that is done; may raise to end the work."""


def pack_documents(
    kind: str,
    where: str,
    tokenizer: Tokenizer,
    cache_dir: Path,
    out_path: Path,
    tell: Tell,
    chat: ChatTemplate | None = None,
) -> None:
    """Tokenise a data set, of conversations with `chat`, and write the packed file, or nothing.

    Its folder goes when the corpus is made. Raises InvalidCorpus, OSError.
    """
    shards = shards_of(kind, where)
    folder = cache_dir / f"tokens-{_key(shards, tokenizer, chat)}"
    if not all(shard.identity for shard in shards):
        # It may change from one start to the next, so its tokens go when the file is written.
        folder = out_path.parent / folder.name
    folder.mkdir(parents=True, exist_ok=True)
    _tokenise(shards, tokenizer, folder, tell, chat)
    tokens = [outputs(folder, number) for number in range(len(shards))]
    train, held_out = ([paths[which] for paths in tokens] for which in (0, 1))
    sizes_bytes = _bytes_of(train), _bytes_of(held_out)
    if not all(sizes_bytes):
        what = "documents" if chat is None else "conversations"
        raise InvalidCorpus(
            f"{kind}:{where} has too few {what}: one in {HELD_OUT_OF} is held out for"
            " validation, and there has to be one of either"
        )
    opened = _each_opened((*train, *held_out))
    write_packed(out_path, tokenizer, sizes_bytes, opened, tell, dtype=_dtype(tokenizer, chat))


def _bytes_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _each_opened(paths: Iterable[Path]) -> Iterator[IO[bytes]]:
    """The files, one open at a time: a data set may have more shards than files can be open."""
    for path in paths:
        with path.open("rb") as file:
            yield file


def _dtype(tokenizer: Tokenizer, chat: ChatTemplate | None) -> np.dtype[Any]:
    return token_dtype(tokenizer.vocabulary_size * (1 if chat is None else 2))


def _key(shards: Sequence[Shard], tokenizer: Tokenizer, chat: ChatTemplate | None) -> str:
    template = [] if chat is None else [chat.jinja]
    told = json.dumps(
        [tokenizer.digest, *template, *(asdict(shard) for shard in shards)], sort_keys=True
    )
    return blake3.blake3(told.encode()).hexdigest(length=16)


def outputs(folder: Path, number: int) -> tuple[Path, Path]:
    """The two files of a shard: tokens to train on, and held-out ones."""
    return folder / f"{number}.train", folder / f"{number}.held-out"


def _tokenise(
    shards: Sequence[Shard],
    tokenizer: Tokenizer,
    folder: Path,
    tell: Tell,
    chat: ChatTemplate | None,
) -> None:
    """Tokenise the shards that are not done."""
    files = [outputs(folder, number) for number in range(len(shards))]
    todo = [n for n, paths in enumerate(files) if not all(path.is_file() for path in paths)]
    sizes, unit = _sizes(shards)
    done = sum(sizes) - sum(sizes[number] for number in todo)
    for number in todo:

        def reached(share: float, done: int = done, size: int = sizes[number]) -> None:
            tell(TaskProgress("tokenising", done + share * size, sum(sizes), unit))

        tokenise_shard(shards[number], tokenizer, files[number], reached, chat)
        done += sizes[number]


def _sizes(shards: Sequence[Shard]) -> tuple[list[int], str]:
    """How large each shard is, and in which unit: nobody knows the bytes of a stream."""
    if any(shard.kind == "hf" for shard in shards):
        return [1] * len(shards), "shards"
    return [Path(shard.where).stat().st_size for shard in shards], BYTES


def tokenise_shard(
    shard: Shard,
    tokenizer: Tokenizer,
    paths: tuple[Path, Path],
    reached: Reached = lambda _: None,
    chat: ChatTemplate | None = None,
) -> None:
    """Write a shard's tokens to its two files. Raises InvalidCorpus, OSError; and as `reached`."""
    dtype = _dtype(tokenizer, chat)
    passages = text_passage if chat is None else chat.passages
    ends = tokenizer.separator if chat is None else ()  # a template ends its texts itself
    separator = np.array(ends, dtype=dtype).tobytes()
    row, reading = 0, ShardRead()
    with replacing(paths[0]) as train, replacing(paths[1]) as held_out:
        for batch in _batches(documents(shard, reading, passages)):
            for tokens in _tokens(tokenizer, batch, shard):
                file = held_out if _is_held_out(shard.name, row) else train
                file.write(tokens.astype(dtype).tobytes() + separator)
                row += 1
            reached(reading.share)


def _batches(found: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    """Documents, with their numbers, some at a time."""
    batch, characters = list[Numbered](), 0
    for document in found:
        batch.append(document)
        characters += sum(len(text) for text, _ in document[1])
        if characters >= PART_BYTES:
            yield batch
            batch, characters = [], 0
    yield batch


def _is_held_out(shard: str, row: int) -> bool:
    if row >= HELD_OUT_ROWS:
        return False
    digest = blake3.blake3(f"held-out/{shard}/{row}".encode()).digest(length=8)
    return int.from_bytes(digest, "big") % HELD_OUT_OF == 0


def _tokens(tokenizer: Tokenizer, batch: Sequence[Numbered], shard: Shard) -> list[Tokens]:
    """The tokens of each. Raises InvalidCorpus for the one that the library cannot read."""
    passages = [passage for _, document in batch for passage in document]
    try:
        rows = tokenizer.encode_all([text for text, _ in passages])
    except BaseException as error:  # a panic of the library's Rust is no Exception
        if len(batch) > 1:
            return [tokens for each in batch for tokens in _tokens(tokenizer, [each], shard)]
        raise InvalidCorpus(
            f"{shard.place_of(batch[0][0])}: the tokenizer cannot read it"
            f" ({type(error).__name__}: {error}); mend or remove it"
        ) from error
    marked = iter(
        row.astype(np.uint32) + tokenizer.vocabulary_size if given else row
        for row, (_, given) in zip(rows, passages, strict=True)
    )
    return [np.concatenate([next(marked) for _ in document]) for _, document in batch]


def remove_all_drafts(cache_dir: Path) -> None:
    """Remove drafts of an earlier life from a cache that no other process uses."""
    for folder in cache_dir.glob(f"{PACKING}*"):
        shutil.rmtree(folder, ignore_errors=True)
    for path in cache_dir.glob("tokens-*/.*"):
        path.unlink(missing_ok=True)
