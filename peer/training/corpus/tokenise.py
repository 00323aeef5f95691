"""Tokenising a data set: its shards in several processes, each kept when it is done.

A process takes every n-th shard that is not done, and writes the tokens of its documents to two
files, those to train on and those that are held out; when both are whole, they get their names. So
what was done stays done when the machine stops, or another run needs the same data set. In the end
the shards are put together in order, into one packed file (packed.py).

    tokens-<key>/N.train, N.held-out     key: of tokenizer and shards, by name and identity

Held out is one document in HELD_OUT_OF of the first HELD_OUT_ROWS of each shard, by the hash of its
place.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO, Final

import blake3
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..tokenizer import Tokenizer, load_tokenizer
from .documents import Shard, documents, shards_of
from .packed import InvalidCorpus, PackedHeader, token_dtype, write_packed

HELD_OUT_OF: Final = 20
HELD_OUT_ROWS: Final = 10_000
MAX_PROCESSES: Final = 16
Told = Callable[[int, int], None]
"""Told of so many further bytes of text, and shards that are done."""
TOLD_BYTES: Final = 1 << 22
"""Text after which a process says how far it is."""


def pack_documents(
    kind: str, where: str, tokenizer: Tokenizer, source: str, cache_dir: Path, out_path: Path
) -> None:
    """Tokenise a data set, and write the packed file, whole or not at all.

    Args:
        source: of the tokenizer, for the processes.

    Raises:
        InvalidCorpus: it cannot be read, or nothing of it could be held out.
    """
    shards = shards_of(kind, where)
    folder = cache_dir / f"tokens-{_key(shards, tokenizer)}"
    folder.mkdir(parents=True, exist_ok=True)
    _tokenise(shards, source, folder)
    outputs = [_outputs(folder, number) for number in range(len(shards))]
    train, held_out = ([paths[which] for paths in outputs] for which in (0, 1))
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
    write_packed(out_path, header, _each_opened((*train, *held_out)))


def _each_opened(paths: Iterable[Path]) -> Iterator[IO[bytes]]:
    """The files, one open at a time: a data set may have more shards than files can be open."""
    for path in paths:
        with path.open("rb") as file:
            yield file


def _key(shards: Sequence[Shard], tokenizer: Tokenizer) -> str:
    told = json.dumps([tokenizer.digest, *(asdict(shard) for shard in shards)], sort_keys=True)
    return blake3.blake3(told.encode()).hexdigest(length=16)


def _outputs(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"{number}.train", folder / f"{number}.held-out"


def _is_done(folder: Path, number: int) -> bool:
    return all(path.is_file() for path in _outputs(folder, number))


# --- the processes ------------------------------------------------------------------------------


def _tokenise(shards: Sequence[Shard], source: str, folder: Path) -> None:
    """Tokenise the shards that are not done. Raises InvalidCorpus."""
    todo = [number for number in range(len(shards)) if not _is_done(folder, number)]
    if not todo:
        return
    count = min(len(todo), MAX_PROCESSES, os.cpu_count() or 1)
    orders = [
        json.dumps([source, str(folder), [(n, asdict(shards[n])) for n in todo[first::count]]])
        for first in range(count)
    ]
    console = Console(stderr=True)
    columns = (
        TextColumn("tokenising"), BarColumn(), MofNCompleteColumn(), TextColumn("shards,"),
        TextColumn("{task.fields[mebibytes]:.0f} MiB of text"), TimeRemainingColumn(),
    )  # fmt: skip
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ThreadPoolExecutor(count) as pool,
    ):
        bar = progress.add_task("", total=len(shards), completed=len(shards) - len(todo))
        progress.update(bar, mebibytes=0.0)
        seen = {"bytes": 0}

        def told(num_bytes: int, shards_done: int) -> None:
            seen["bytes"] += num_bytes
            progress.update(bar, advance=shards_done, mebibytes=seen["bytes"] / 2**20)

        for running in [pool.submit(_one_process, order, told) for order in orders]:
            running.result()


def _one_process(order: str, told: Told) -> None:
    command = [sys.executable, "-m", "peer.training.corpus.tokenise"]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(order)
        process.stdin.close()
        failed = "a process that tokenised ended without a word"
        for line in process.stdout:
            say = json.loads(line)
            if "error" in say:
                failed = say["error"]
            else:
                told(say["bytes"], say["shards"])
    if process.returncode:
        raise InvalidCorpus(failed)


def work(order: IO[str], out: IO[str]) -> int:
    """What such a process does: its orders come in as JSON, and how far it is goes out."""
    source, folder, shards = json.load(order)
    try:
        tokenizer = load_tokenizer(source)
        for number, shard in shards:
            _tokenise_shard(Shard(**shard), tokenizer, Path(folder), number, out)
    except (InvalidCorpus, ValueError, OSError) as error:
        _say(out, error=str(error))
        return 1
    return 0


def _tokenise_shard(
    shard: Shard, tokenizer: Tokenizer, folder: Path, number: int, out: IO[str]
) -> None:
    """Write a shard's tokens under their names when all of them are there."""
    names = _outputs(folder, number)
    aside = [path.with_name(f".{path.name}.{os.getpid()}") for path in names]
    dtype = token_dtype(tokenizer.vocabulary_size)
    separator = np.array(tokenizer.separator, dtype=dtype)
    with aside[0].open("wb") as train, aside[1].open("wb") as held_out:
        untold = 0
        for row, text in enumerate(documents(shard)):
            file = held_out if _is_held_out(shard.name, row) else train
            tokens: npt.NDArray[np.unsignedinteger] = tokenizer.encode(text)
            file.write(tokens.astype(dtype).tobytes())
            file.write(separator.tobytes())
            untold += len(text)
            if untold >= TOLD_BYTES:
                _say(out, bytes=untold, shards=0)
                untold = 0
    for temporary, name in zip(aside, names, strict=True):
        temporary.replace(name)
    _say(out, bytes=untold, shards=1)


def _is_held_out(shard: str, row: int) -> bool:
    if row >= HELD_OUT_ROWS:
        return False
    digest = blake3.blake3(f"held-out/{shard}/{row}".encode()).digest(length=8)
    return int.from_bytes(digest, "big") % HELD_OUT_OF == 0


def _say(out: IO[str], **what: object) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(work(sys.stdin, sys.stdout))
