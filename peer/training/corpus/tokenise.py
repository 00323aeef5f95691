"""Tokenising a data set: its shards in several processes, each kept when it is done.

A process (shard_process.py) takes every n-th shard that is not done, and writes the tokens of its
documents to two files, those to train on and those that are held out; when both are whole, they get
their names. So what was done stays done when the machine stops, or another run needs the same data
set. In the end the shards are put together in order, into one packed file (packed.py).

    tokens-<key>/N.train, N.held-out     key: of tokenizer and shards, by name and identity

Held out is one document in HELD_OUT_OF of the first HELD_OUT_ROWS of each shard, by the hash of its
place.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

import blake3
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..tokenizer import Tokenizer
from .checks import Check, go_on
from .documents import Shard, shards_of
from .packed import InvalidCorpus, PackedHeader, token_dtype, write_packed
from .processes import run_processes
from .shard_files import HELD_OUT_OF, is_done, outputs, remove_drafts, tokens_folder

PROGRAM: Final = "peer.training.corpus.shard_process"
"""What a process runs."""
MAX_PROCESSES: Final = 16


def pack_documents(
    kind: str,
    where: str,
    tokenizer: Tokenizer,
    source: str,
    cache_dir: Path,
    out_path: Path,
    check: Check = go_on,
) -> None:
    """Tokenise a data set, and write the packed file, whole or not at all.

    Args:
        source: of the tokenizer, for the processes.
        out_path: in a folder that goes when the corpus is made.

    Raises:
        InvalidCorpus: it cannot be read, or nothing of it could be held out.
        OSError: the cache cannot be written.
    """
    shards = shards_of(kind, where)
    folder = tokens_folder(cache_dir, _key(shards, tokenizer))
    if not all(shard.identity for shard in shards):
        # It may change from one start to the next, so its tokens go when the file is written.
        folder = out_path.parent / folder.name
    folder.mkdir(parents=True, exist_ok=True)
    _tokenise(shards, source, folder, check)
    tokens = [outputs(folder, number) for number in range(len(shards))]
    train, held_out = ([paths[which] for paths in tokens] for which in (0, 1))
    counts = [sum(path.stat().st_size for path in part) for part in (train, held_out)]
    if not all(counts):
        raise InvalidCorpus(
            f"{kind}:{where} has too few documents: one in {HELD_OUT_OF} is held out for"
            " validation, and there has to be one of either"
        )
    dtype = token_dtype(tokenizer.vocabulary_size)
    header = PackedHeader(
        tokenizer.digest,
        tokenizer.vocabulary_size,
        dtype.str,
        counts[0] // dtype.itemsize,
        counts[1] // dtype.itemsize,
        (),
    )
    write_packed(out_path, header, _each_opened((*train, *held_out)), check)


def _each_opened(paths: Iterable[Path]) -> Iterator[IO[bytes]]:
    """The files, one open at a time: a data set may have more shards than files can be open."""
    for path in paths:
        with path.open("rb") as file:
            yield file


def _key(shards: Sequence[Shard], tokenizer: Tokenizer) -> str:
    told = json.dumps([tokenizer.digest, *(asdict(shard) for shard in shards)], sort_keys=True)
    return blake3.blake3(told.encode()).hexdigest(length=16)


def _tokenise(shards: Sequence[Shard], source: str, folder: Path, check: Check) -> None:
    """Tokenise the shards that are not done. Raises InvalidCorpus, OSError."""
    todo = [number for number in range(len(shards)) if not is_done(folder, number)]
    if not todo:
        return
    count = min(len(todo), MAX_PROCESSES, os.cpu_count() or 1)
    orders = [
        [source, str(folder), [(n, asdict(shards[n])) for n in todo[first::count]]]
        for first in range(count)
    ]
    console = Console(stderr=True)
    columns = (
        TextColumn("tokenising"), BarColumn(), MofNCompleteColumn(), TextColumn("shards,"),
        TextColumn("{task.fields[mebibytes]:.0f} MiB of text"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(shards), completed=len(shards) - len(todo))
        progress.update(bar, mebibytes=0.0)
        seen = {"bytes": 0}

        def heard(said: dict[str, Any]) -> None:
            seen["bytes"] += said.get("bytes", 0)
            progress.update(bar, advance=said.get("shards", 0), mebibytes=seen["bytes"] / 2**20)

        try:
            run_processes(PROGRAM, orders, heard, check)
        finally:
            remove_drafts(folder)
