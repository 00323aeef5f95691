"""Token files that were made elsewhere: .npy, or .bin of little-endian uint16 (.u32 for uint32)."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .checks import Check, go_on
from .packed import InvalidCorpus

RAW_SUFFIXES: Final = (".npy", ".bin", ".u32")
_CHUNK_TOKENS: Final = 1 << 24

Tokens = npt.NDArray[Any]


def map_tokens(path: Path) -> Tokens:
    """The tokens of a file, mapped. Raises InvalidCorpus."""
    try:
        if path.suffix != ".npy":
            return np.memmap(path, dtype="<u4" if path.suffix == ".u32" else "<u2", mode="r")
        tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidCorpus(f"cannot read tokens from {path}: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise InvalidCorpus(f"{path} holds {tokens.dtype} {tokens.shape}, not a row of integers")
    return tokens


def largest_token(path: Path, check: Check = go_on) -> int:
    """The largest token of a file; a negative one is an InvalidCorpus."""
    tokens = map_tokens(path)
    largest = 0
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        check()
        chunk = tokens[start : start + _CHUNK_TOKENS]
        if chunk.dtype.kind == "i" and chunk.min() < 0:
            raise InvalidCorpus(f"{path} holds negative tokens")
        largest = max(largest, int(chunk.max()))
    return largest
