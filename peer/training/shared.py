"""Memory that the daemon and its trainer share.

Two pieces. `SharedVector` holds the slow weights: the daemon writes, the trainer maps it read-only
through a descriptor that was opened read-only. `ResultSlots` holds the codes of the snapshots: the
trainer writes, the daemon reads.

Rules of the slots, so that a kill at any moment harms nothing:
    1. There are two; rounds alternate, so the codes of the round in exchange lie still while the
       next ones are written.
    2. The writer clears a slot's header, writes the codes, then the header (sequence number, round,
       digest). A slot with sequence 0 holds nothing.
    3. Each life of a trainer gets new slots. Views of the old ones stay valid as long as somebody
       holds them.

On Linux the memory is a memfd: no name, no file system, gone with its last descriptor; elsewhere a
file that is unlinked at once. The descriptors are inherited by the child.
"""

import mmap
import os
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt

NUM_SLOTS: Final = 2
HEADER_BYTES: Final = 4096
"""Space before each slot's codes: a page, so that codes are page-aligned."""
_HEADER: Final = struct.Struct("<QQ32s")


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot holds. Sequence numbers start at 1; 0 in memory means nothing, or half of it."""

    sequence: int
    round: int
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

    def __repr__(self) -> str:
        return f"<SharedVector of {self.array.size} fp32 values, fd {self._fd}>"

    @property
    def fd(self) -> int:
        """Descriptor for whoever may write."""
        return self._fd

    @property
    def read_only_fd(self) -> int:
        """Descriptor for whoever may only read."""
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


def map_vector(fd: int, *, writable: bool = False) -> npt.NDArray[np.float32]:
    """The child's view of a SharedVector."""
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    return np.frombuffer(mmap.mmap(fd, 0, access=access), dtype=np.float32)


class ResultSlots:
    """Two slots for codes of `code_bytes` bytes each."""

    def __init__(self, fd: int, code_bytes: int, *, writable: bool) -> None:
        self._fd = fd
        self.code_bytes = code_bytes
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._memory = memoryview(mmap.mmap(fd, _slots_bytes(code_bytes), access=access))
        self._sequence = 0

    @classmethod
    def create(cls, code_bytes: int, directory: Path | None = None) -> Self:
        """New, empty slots: the daemon's side, which only reads."""
        fd, read_only_fd = _anonymous_file("loco-codes", _slots_bytes(code_bytes), directory)
        os.close(read_only_fd)
        return cls(fd, code_bytes, writable=False)

    def __repr__(self) -> str:
        return f"<ResultSlots {[self.header(slot) for slot in range(NUM_SLOTS)]}>"

    @property
    def fd(self) -> int:
        """Descriptor for the child."""
        return self._fd

    def close(self) -> None:
        """Give back the descriptor. Views stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def codes(self, slot: int) -> memoryview:
        """The codes of a slot. Raises IndexError."""
        start = self._start(slot) + HEADER_BYTES
        return self._memory[start : start + self.code_bytes]

    def header(self, slot: int) -> SlotHeader | None:
        """What the slot holds; None when nothing, or a write that did not end."""
        sequence, round_, digest = _HEADER.unpack_from(self._memory, self._start(slot))
        return SlotHeader(sequence, round_, digest.decode("ascii")) if sequence else None

    def begin(self, slot: int) -> memoryview:
        """The writer's first act: empty the slot, and get the memory to write the codes to."""
        _HEADER.pack_into(self._memory, self._start(slot), 0, 0, bytes(32))
        return self.codes(slot)

    def commit(self, slot: int, round_: int, digest: str) -> None:
        """The writer's last act."""
        self._sequence += 1
        start = self._start(slot)
        _HEADER.pack_into(self._memory, start, 0, round_, digest.encode("ascii"))
        # The sequence number makes the header count, so it is written by itself and last.
        struct.pack_into("<Q", self._memory, start, self._sequence)

    def _start(self, slot: int) -> int:
        if not 0 <= slot < NUM_SLOTS:
            raise IndexError(f"no slot {slot}; there are {NUM_SLOTS}")
        return slot * _slot_bytes(self.code_bytes)


def _slot_bytes(code_bytes: int) -> int:
    return HEADER_BYTES + -(-code_bytes // HEADER_BYTES) * HEADER_BYTES


def _slots_bytes(code_bytes: int) -> int:
    return NUM_SLOTS * _slot_bytes(code_bytes)


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
