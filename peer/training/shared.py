"""Memory that the daemon and its trainer share.

Two pieces. `SharedVector` holds the slow weights: the daemon writes, the trainer maps it read-only
through a descriptor that was opened read-only. `CodeRegions` hold codes: the trainer writes, the
daemon reads. Each fragment has one region; a whole model that is averaged in pairs is one fragment.

Rules of the regions, so that a kill at any moment harms nothing:
    1. Codes that are on their way lie still: a fragment's region is written again only when its
       codes have come back as an average.
    2. The writer clears a region's header, writes the codes, then the header (sequence number,
       cycle, digest). A region with sequence 0 holds nothing.
    3. Each life of a trainer gets new regions. Views of the old ones stay valid as long as somebody
       holds them.

On Linux the memory is a memfd: no name, no file system, gone with its last descriptor; elsewhere a
file that is unlinked at once. The descriptors are inherited by the child.
"""

import itertools
import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from peer.codec import Codec
from protocol.fragment.fragments import Fragment

HEADER_BYTES: Final = max(4096, mmap.PAGESIZE)
"""Space before each region's codes: a page, so that codes are page-aligned."""
_HEADER: Final = struct.Struct("<QQ32s")


@dataclass(frozen=True, slots=True)
class RegionHeader:
    """What a region holds.

    Sequence numbers start at 1; 0 in memory means nothing, or half of it.
    """

    sequence: int
    cycle: int
    digest: str


class SharedVector:
    """A flat fp32 vector in shared memory: the slow weights.

    Attributes:
        array: our writable view, [padded_parameters].
    """

    def __init__(self, padded_parameters: int, directory: Path | None = None) -> None:
        self._bytes = padded_parameters * 4
        self._fd, self._read_only_fd = _anonymous_file("loco-slow-weights", self._bytes, directory)
        memory = mmap.mmap(self._fd, self._bytes)
        self.array: npt.NDArray[np.float32] = np.frombuffer(memory, dtype=np.float32)

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


def map_vector(fd: int) -> npt.NDArray[np.float32]:
    """The child's view of a SharedVector, read-only."""
    return np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), dtype=np.float32)


def code_memory(size_bytes: int, directory: Path | None = None) -> int:
    """Descriptor of zeroed memory for codes.

    The daemon makes it before it knows the model, so of no size; the trainer gives it its size.
    """
    fd, read_only_fd = _anonymous_file("loco-codes", size_bytes, directory)
    os.close(read_only_fd)
    return fd


class CodeRegions:
    """Memory for codes: one region of each of these lengths.

    A descriptor of -1 is memory of this process alone.

    Attributes:
        code_bytes: length of the codes of each region.
    """

    def __init__(self, fd: int, code_bytes: Sequence[int], *, writable: bool) -> None:
        self._fd = fd
        self.code_bytes = tuple(code_bytes)
        *self._starts, size_bytes = _starts(self.code_bytes)
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._memory = memoryview(mmap.mmap(fd, size_bytes, access=access))
        self._sequence = 0

    @classmethod
    def create(cls, code_bytes: Sequence[int], directory: Path | None = None) -> Self:
        """New, empty regions: the daemon's side, which only reads."""
        return cls(code_memory(_starts(code_bytes)[-1], directory), code_bytes, writable=False)

    @classmethod
    def create_in(cls, fd: int, code_bytes: Sequence[int]) -> Self:
        """New, empty regions in memory of whatever size: the writer's side."""
        os.ftruncate(fd, _starts(code_bytes)[-1])
        return cls(fd, code_bytes, writable=True)

    @property
    def fd(self) -> int:
        """Descriptor for the child."""
        return self._fd

    def close(self) -> None:
        """Give back the descriptor. Views stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def codes(self, region: int) -> memoryview:
        """The codes of a region. Raises IndexError."""
        start = self._start(region) + HEADER_BYTES
        return self._memory[start : start + self.code_bytes[region]]

    def header(self, region: int) -> RegionHeader | None:
        """What the region holds; None when nothing, or a write that did not end."""
        sequence, cycle, digest = _HEADER.unpack_from(self._memory, self._start(region))
        return RegionHeader(sequence, cycle, digest.decode("ascii")) if sequence else None

    def begin(self, region: int) -> memoryview:
        """The writer's first act: empty the region, and get the memory to write the codes to."""
        _HEADER.pack_into(self._memory, self._start(region), 0, 0, bytes(32))
        return self.codes(region)

    def commit(self, region: int, cycle: int, digest: str) -> None:
        """The writer's last act."""
        self._sequence += 1
        start = self._start(region)
        _HEADER.pack_into(self._memory, start, 0, cycle, digest.encode("ascii"))
        # The sequence number makes the header count, so it is written by itself and last.
        struct.pack_into("<Q", self._memory, start, self._sequence)

    def _start(self, region: int) -> int:
        if not 0 <= region < len(self._starts):
            raise IndexError(f"no region {region}; there are {len(self._starts)}")
        return self._starts[region]


def region_bytes(fragments: Sequence[Fragment], codec: Codec) -> tuple[int, ...]:
    """The regions of streaming: the codes of each fragment, chunk after chunk."""
    return tuple(
        sum(codec.code_bytes(stop - start) for start, stop in fragment.chunks)
        for fragment in fragments
    )


def _starts(code_bytes: Sequence[int]) -> list[int]:
    """Where each region starts, and where the last one ends."""
    sizes = (HEADER_BYTES + -(-size // HEADER_BYTES) * HEADER_BYTES for size in code_bytes)
    return list(itertools.accumulate(sizes, initial=0))


def _anonymous_file(name: str, size_bytes: int, directory: Path | None) -> tuple[int, int]:
    """Descriptors of zeroed memory without a name: (read and write, read only)."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name)
        os.ftruncate(fd, size_bytes)
        return fd, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix=f"{name}-", dir=directory)
    try:
        os.ftruncate(fd, size_bytes)
        return fd, os.open(path, os.O_RDONLY)
    finally:
        Path(path).unlink()
