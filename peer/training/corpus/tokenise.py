"""Tokenising a data set: its shards in several processes, each kept when it is done.

A process (shard_process.py) takes every n-th shard that is not done, and writes the tokens of its
documents to two files, those to train on and those that are held out; when both are whole, they get
their names. So what was done stays done when the machine stops, or another run needs the same data
set. In the end the shards are put together in order, into one packed file (packed.py).

    tokens-<key>/N.train, N.held-out     key: of tokenizer and shards, by name and identity

Held out is one document in HELD_OUT_OF of the first HELD_OUT_ROWS of each shard, by the hash of its
place.

Processes that work for whoever makes a corpus, and end with it.

Rules:
    1. Each has a session of its own: Ctrl+C in a terminal is for the daemon, which ends them.
    2. Their input stays open while we live. Its first line is the order; its end, which comes
       however we die, ends them.
    3. They say how far they are in lines of JSON. One that fails says why, and exits with 1.
    4. The first failure ends all of them at once, and so does a caller that is cancelled.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final, Self

import blake3
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .documents import Shard, shards_of
from .packed import Check, InvalidCorpus, PackedHeader, go_on, token_dtype, write_packed
from .shard_files import HELD_OUT_OF, is_done, outputs, remove_drafts, tokens_folder
from .tokenizer import Tokenizer

# --- processes ------------------------------------------------------------------------------------

POLL_S: Final = 0.1
"""Between two looks at whether the caller is cancelled."""
_READ_BYTES: Final = 65536
_KILLED: Final = -signal.SIGKILL
Heard = Callable[[dict[str, Any]], None]
"""Takes what a process says of its work."""


def run_processes(module: str, orders: Sequence[object], heard: Heard, check: Check) -> None:
    """Run a process of a module for each order, all to their ends.

    Raises:
        InvalidCorpus: one failed, and said why.
        OSError: one could not write, or could not be started.
    """
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        # All are started before one is told anything: they import at the same time.
        processes = [stack.enter_context(_Process(module)) for _ in orders]
        for process, order in zip(processes, orders, strict=True):
            process.begin(order)
            selector.register(process, selectors.EVENT_READ, process)
        while selector.get_map():
            check()
            for key, _ in selector.select(POLL_S):
                if not key.data.hear(heard):
                    selector.unregister(key.fileobj)


class _Process:
    """One of them; leaving the context ends it."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._begun_line = b""
        self._last: dict[str, Any] = {}
        self._at = "nothing yet"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()
        with suppress(BrokenPipeError):  # it ended before it took its order
            self._input.close()

    def fileno(self) -> int:
        """The descriptor of what it says, for selectors."""
        return self._output.fileno()

    def begin(self, order: object) -> None:
        """Tell it what to do."""
        with suppress(BrokenPipeError):  # how it ended is told when its output ends
            self._input.write(json.dumps(order).encode() + b"\n")
            self._input.flush()

    def hear(self, heard: Heard) -> bool:
        """Take what it has said; False when it has done its work. Raises InvalidCorpus, OSError."""
        data = os.read(self.fileno(), _READ_BYTES)
        if not data:
            self._check_end(self._process.wait())
            return False
        *lines, self._begun_line = (self._begun_line + data).split(b"\n")
        for line in lines:
            self._last = json.loads(line)
            self._at = self._last.get("at", self._at)
            heard(self._last)
        return True

    def _check_end(self, status: int) -> None:
        if not status:
            return
        if "errno" in self._last:
            number = self._last["errno"]
            raise OSError(number, os.strerror(number), self._last["path"])
        if "error" in self._last:
            raise InvalidCorpus(self._last["error"])
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        why = ", perhaps for want of memory" if status == _KILLED else ""
        raise InvalidCorpus(
            f"a process that tokenised {how}{why}; it was at {self._at}. Start again: shards that"
            " were done are kept"
        )


# --- tokenise -------------------------------------------------------------------------------------

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
