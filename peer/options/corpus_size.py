"""How many tokens a run's corpus has, as far as the names and sizes of files say; nothing is read.

Text is counted as bytes, a tokenizer's tokens as BYTES_PER_TOKEN of them each, which fits English
and GPT-2's tokenizer; other texts differ by half. Of rows (`jsonl`, `parquet`) and of the hub
nothing is known before they are read.
"""

import glob
from pathlib import Path
from typing import Final

from protocol.run.run_spec import RunSpec

STDLIB_TOKENS: Final = 8_000_000
"""At most: what `stdlib` is cut to."""
BYTES_PER_TOKEN: Final = 4
OTHER_TEXTS: Final = 2
TOKEN_BYTES: Final = 2
"""On the disk, at the least; one of `bytes` takes one."""
MAX_FILES: Final = 100_000


def corpus_tokens_of(spec: RunSpec, source: str | None = None) -> int | None:
    """Tokens of the run's corpus, roughly; None where that is not known yet.

    Args:
        source: in place of the spec's, on this machine.
    """
    kind, _, where = (source or spec.data.source).partition(":")
    each = 1 if spec.data.tokenizer == "bytes" else BYTES_PER_TOKEN
    if kind == "stdlib":
        return STDLIB_TOKENS // each
    if kind != "text":
        return None
    try:
        # Path.glob takes no absolute pattern.
        names = glob.glob(str(Path(where).expanduser()), recursive=True)[:MAX_FILES]  # noqa: PTH207
        size = sum(path.stat().st_size for path in map(Path, names) if path.is_file())
    except OSError:
        return None
    return size // each or None


def least_corpus_bytes(spec: RunSpec, source: str | None = None) -> int:
    """What the corpus will take on the disk at the least; 0 where nothing is known of that."""
    if spec.data.manifest is not None:
        return 0  # it is made already, and comes in pieces
    tokens = corpus_tokens_of(spec, source) or 0
    return tokens if spec.data.tokenizer == "bytes" else tokens // OTHER_TEXTS * TOKEN_BYTES
