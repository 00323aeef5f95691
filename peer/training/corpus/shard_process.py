"""The process that tokenises shards (tokenise.py); not for people.

python -m peer.training.corpus.shard_process < ORDER

The order is a line of JSON: the tokenizer's source, the folder, and the shards with their numbers.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from peer.ports.terminal import outlive_terminal

from .documents import Shard, documents
from .packed import InvalidCorpus, replacing, token_dtype
from .shard_files import is_document_held_out, outputs
from .tokenizer import Tokenizer, load_tokenizer

TOLD_BYTES: Final = 1 << 22
"""Text after which a process says how far it is."""
_EXIT_PARENT_GONE: Final = 0


def main() -> int:
    """Take the order, and carry it out. Returns the exit status."""
    # A service manager may tell all processes to end; that is the daemon's to handle, which then
    # stops us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    outlive_terminal()
    order = sys.stdin.buffer.readline()
    if not order:
        return _EXIT_PARENT_GONE
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    source, folder, shards = json.loads(order)
    todo = [(number, Shard(**shard)) for number, shard in shards]
    return work(source, Path(folder), todo, sys.stdout)


def _end_with_parent() -> None:
    """End this process when nobody holds its input any more, whatever it does at that moment."""
    while os.read(0, 1):
        pass
    os._exit(_EXIT_PARENT_GONE)


def work(source: str, folder: Path, shards: Sequence[tuple[int, Shard]], out: IO[str]) -> int:
    """Tokenise these shards, and say how far it is. Returns the exit status."""
    try:
        tokenizer = load_tokenizer(source)
        for number, shard in shards:
            _say(out, at=shard.place)
            _tokenise_shard(shard, tokenizer, folder, number, out)
    except (InvalidCorpus, ValueError) as error:
        _say(out, error=str(error))
    except OSError as error:
        _say(out, errno=error.errno, path=str(error.filename or folder))
    else:
        return 0
    return 1


def _tokenise_shard(
    shard: Shard, tokenizer: Tokenizer, folder: Path, number: int, out: IO[str]
) -> None:
    """Write a shard's tokens under their names when all of them are there."""
    names = outputs(folder, number)
    dtype = token_dtype(tokenizer.vocabulary_size)
    separator = np.array(tokenizer.separator, dtype=dtype)
    with replacing(names[0]) as train, replacing(names[1]) as held_out:
        untold = 0
        for row, (place, text) in enumerate(documents(shard)):
            file = held_out if is_document_held_out(shard.name, row) else train
            file.write(_tokens(tokenizer, text, shard, place).astype(dtype).tobytes())
            file.write(separator.tobytes())
            untold += len(text)
            if untold >= TOLD_BYTES:
                _say(out, bytes=untold, shards=0)
                untold = 0
    _say(out, bytes=untold, shards=1)


def _tokens(
    tokenizer: Tokenizer, text: str, shard: Shard, number: int
) -> npt.NDArray[np.unsignedinteger[Any]]:
    try:
        return tokenizer.encode(text)
    except BaseException as error:  # a panic of the library's Rust is no Exception
        raise InvalidCorpus(
            f"{shard.place_of(number)}: the tokenizer cannot read it"
            f" ({type(error).__name__}: {error}); mend or remove it"
        ) from error


def _say(out: IO[str], **what: object) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


if __name__ == "__main__":
    # At once, since threads of the libraries that read data sets may hold up an ordinary end.
    os._exit(main())
