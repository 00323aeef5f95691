"""Memory that the daemon and its trainer share.

Two pieces, or three (ring.py). `SharedVector` holds the slow weights: the daemon writes, the
trainer maps it read-only through a descriptor that was opened read-only. `CodeRegions` hold codes:
the trainer writes, the daemon reads. Each fragment has one region; a whole model that is averaged
in pairs is one fragment.

Rules of the regions, so that a kill at any moment harms nothing:
    1. Codes that are on their way lie still: a fragment's region is written again only when its
       codes have come back as an average.
    2. A region holds something from `FragmentSent` on, which is said when all codes are written.
    3. Each life of a trainer gets new regions. Views of the old ones stay valid as long as somebody
       holds them.

On Linux the memory is a memfd: no name, no file system, gone with its last descriptor; elsewhere a
file that is unlinked at once. The descriptors are inherited by the child.
"""

import itertools
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from protocol.content.samples import Float32Vector


class SharedVector:
    """A flat fp32 vector in shared memory: the slow weights.

    Attributes:
        array: our writable view, [padded_parameters].
    """

    def __init__(self, padded_parameters: int) -> None:
        self._bytes = padded_parameters * 4
        self._fd, self._read_only_fd = _anonymous_file("loco-slow-weights", self._bytes)
        memory = mmap.mmap(self._fd, self._bytes)
        self.array: Float32Vector = np.frombuffer(memory, dtype=np.float32)

    @property
    def read_only_fd(self) -> int:
        """The trainer's descriptor."""
        return self._read_only_fd

    def close(self) -> None:
        """Give back the descriptors. Views stay valid."""
        for fd in (self._fd, self._read_only_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._read_only_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def map_vector(fd: int) -> Float32Vector:
    """The child's view of a SharedVector, read-only."""
    return np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), dtype=np.float32)


def code_memory() -> int:
    """Descriptor of memory for codes.

    The daemon makes it before it knows the model, so of no size; the trainer gives it its size.
    """
    fd, read_only_fd = _anonymous_file("loco-codes", 0)
    os.close(read_only_fd)
    return fd


class CodeRegions:
    """Memory for codes: one region of each of these lengths, on pages of its own.

    The writer gives the memory its size.

    Args:
        fd: of `code_memory`; -1 is memory of this process alone.

    Attributes:
        code_bytes: length of the codes of each region.
    """

    def __init__(self, fd: int, code_bytes: Sequence[int], *, writable: bool) -> None:
        self.code_bytes = tuple(code_bytes)
        pages = (-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in self.code_bytes)
        *self._starts, size_bytes = itertools.accumulate(pages, initial=0)
        if writable and fd >= 0:
            os.ftruncate(fd, size_bytes)
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._memory = memoryview(mmap.mmap(fd, size_bytes, access=access))

    def codes(self, region: int) -> memoryview:
        """The codes of a region. Raises IndexError."""
        if not 0 <= region < len(self._starts):
            raise IndexError(f"no region {region}; there are {len(self._starts)}")
        start = self._starts[region]
        return self._memory[start : start + self.code_bytes[region]]


def _anonymous_file(name: str, size_bytes: int) -> tuple[int, int]:
    """Descriptors of zeroed memory without a name: (read and write, read only)."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name)
        os.ftruncate(fd, size_bytes)
        return fd, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix=f"{name}-")
    try:
        os.ftruncate(fd, size_bytes)
        return fd, os.open(path, os.O_RDONLY)
    finally:
        Path(path).unlink()
