"""A corpus of one text: its tail is held out, for there is no second file to validate with.

The text is read in parts, so that it may be larger than the memory. Parts end at the end of a line
where lines are not too long, and what is held out begins with one.
"""

import codecs
from collections.abc import Iterator
from errno import EIO
from pathlib import Path
from typing import Final

TAIL_OF: Final = 20
"""The last of so many parts of the bytes is held out."""
PART_BYTES: Final = 1 << 20
MAX_LINE_BYTES: Final = 1 << 20
_CONTINUES: Final = range(0x80, 0xC0)
"""Bytes of UTF-8 that go on with a character."""


def tail_start(path: Path) -> int:
    """Where what is held out begins: a byte offset. Raises OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        wanted = file.seek(size - size // TAIL_OF)
        line = file.readline(MAX_LINE_BYTES)
        if line.endswith(b"\n") and file.tell() < size:
            return file.tell()
        file.seek(wanted)  # no line ends there
        return wanted + sum(1 for _ in _leading(file.read(4)))


def read_parts(path: Path, start: int, end: int) -> Iterator[str]:
    """The text from byte `start` to byte `end`, in parts.

    Raises:
        UnicodeDecodeError: it is no UTF-8.
        OSError
    """
    decode = codecs.getincrementaldecoder("utf-8")().decode
    with path.open("rb") as file:
        file.seek(start)
        while (left := end - file.tell()) > 0:
            data = file.read(min(left, PART_BYTES))
            data += file.readline(min(left - len(data), MAX_LINE_BYTES))
            if not data:
                raise OSError(EIO, "it became shorter while it was read", str(path))
            yield decode(data, final=file.tell() >= end)


def _leading(data: bytes) -> Iterator[int]:
    """The bytes at the beginning that belong to the character before."""
    for byte in data:
        if byte not in _CONTINUES:
            return
        yield byte
