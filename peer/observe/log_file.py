"""Files of lines that survive a crash.

Each line is one `write` to a file opened with O_APPEND, so a crash of the process tears nothing,
and a crash of the machine at most the end of the file. The writer closes a torn last line before it
goes on; readers pass over what is no JSON. Files are rotated by size: `events.jsonl`, then
`events.jsonl.1`, the older the higher, `keep_files` in all.
"""

import os
from pathlib import Path
from typing import Final

MAX_LOG_FILE_BYTES: Final = 16 * 1024 * 1024
KEEP_LOG_FILES: Final = 5
"""Files kept, the current one included."""
MAX_LINE_BYTES: Final = 64 * 1024
"""A longer event is replaced by a short one that says so."""


class LineFile:
    """A rotated file of lines, for one writer."""

    def __init__(
        self,
        path: Path,
        max_file_bytes: int = MAX_LOG_FILE_BYTES,
        keep_files: int = KEEP_LOG_FILES,
    ) -> None:
        """Open or make the file. Raises OSError."""
        self._path = path
        self._max_file_bytes = max_file_bytes
        self._keep_files = keep_files
        self._torn = False
        self._take(_opened(path))

    def write_line(self, line: bytes) -> None:
        """Append `line` and a newline.

        Raises:
            OSError: it was not written, or not whole.
        """
        data = (b"\n" if self._torn else b"") + line + b"\n"
        if self._size_bytes and self._size_bytes + len(data) > self._max_file_bytes:
            self._rotate()
            data = line + b"\n"
        written = os.write(self._descriptor, data)
        self._size_bytes += written
        self._torn = written < len(data)
        if self._torn:
            raise OSError(f"{self._path}: wrote {written} of {len(data)} bytes")

    def close(self) -> None:
        os.close(self._descriptor)

    def _take(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size_bytes = os.fstat(self._descriptor).st_size
        last = os.pread(self._descriptor, 1, self._size_bytes - 1) if self._size_bytes else b"\n"
        self._torn = last != b"\n"

    def _rotate(self) -> None:
        """Go on in a new file. What fails leaves the old one open: there may be no other."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        descriptor = _opened(fresh)
        old = self._descriptor
        for number in range(self._keep_files - 1, 0, -1):
            older = self._path if number == 1 else rotated(self._path, number - 1)
            if older.exists():
                os.replace(older, rotated(self._path, number))
        os.replace(fresh, self._path)
        self._take(descriptor)
        os.close(old)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def rotated(path: Path, number: int) -> Path:
    """The path of an older file: `events.jsonl.3` for number 3."""
    return path.with_name(f"{path.name}.{number}")
