"""Memory that the daemon and its trainer share.

`SharedVector` holds the slow weights: the daemon writes, the trainer maps it read-only through a
descriptor that was opened read-only. `CodeRegions` hold codes: the trainer writes, the daemon
reads. Each fragment has one region; a whole model that is averaged in pairs is one fragment.
`BoundaryRing` holds the boundaries of a trainer that has a stage.

Rules of the slots: 0 to n - 1 are inbound (the daemon writes), n to 2 n - 1 outbound. A slot
belongs to its writer until it is named in a message, then to its reader until that gives it back.
The daemon measures a boundary in its slot before it tells the trainer: one that cannot be decoded
is its sender's fault, and one of a size that cannot be right goes another way
(protocol/microbatch/sizes.py).

Rules of the regions, so that a kill at any moment harms nothing:
    1. A fragment's region is written again only when its codes have come back as an average.
    2. A region holds something from `FragmentSent` on, which is said when all codes are written.
    3. Each life of a trainer gets new regions. Views of the old ones stay valid.

On Linux the memory is a memfd, which goes with its last descriptor; elsewhere a file that is
unlinked at once. The child gets the descriptors with its task.
"""

import itertools
import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import numpy as np

from peer.codec import Codec, codes_as_tensor, relative_distance, root_mean_square
from protocol.content.samples import Float32Vector
from protocol.run.run_spec import RunSpec


class SharedVector:
    """A flat fp32 vector in shared memory; `read_only_fd` is the trainer's descriptor."""

    def __init__(self, padded_parameters: int) -> None:
        size_bytes = padded_parameters * 4
        fd, self.read_only_fd = _anonymous_file("loco-slow-weights", size_bytes)
        memory = mmap.mmap(fd, size_bytes)
        os.close(fd)
        self.array: Float32Vector = np.frombuffer(memory, dtype=np.float32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.read_only_fd)


def map_vector(fd: int) -> Float32Vector:
    """The child's view of a SharedVector, read-only."""
    return np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), dtype=np.float32)


def code_memory() -> int:
    """Descriptor of memory of no size: the daemon does not know the model yet."""
    fd, read_only_fd = _anonymous_file("loco-codes", 0)
    os.close(read_only_fd)
    return fd


class CodeRegions:
    """Memory for codes: a region of each of these lengths, on pages of its own.

    The writer gives the memory its size. The descriptor -1 is memory of this process alone.
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
        """Raises IndexError."""
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


SLOTS: Final = 4
"""Microbatches that a machine holds at once, where its memory is not known."""
MAX_SLOTS: Final = 8
"""More would hide longer ways than the internet has, and cost memory for boundaries."""
RING_PER_SLOT: Final = 2
"""Slots of a ring, each way, for each microbatch: one may wait while another is in transit."""


def boundary_shape(spec: RunSpec) -> tuple[int, int, int]:
    """Sequences of a microbatch, tokens, and width of the model."""
    return spec.microbatch_sequences, spec.model.context_length, spec.model.hidden_size


class BoundaryRing:
    """The slots of both directions, in one shared memory.

    Args:
        num_values: of one boundary.
        slots: of each direction; None where the other end has given the memory its size.
    """

    def __init__(self, fd: int, codec: Codec, num_values: int, slots: int | None = None) -> None:
        self._codec, self._num_values = codec, num_values
        self._slot_bytes = codec.code_bytes(num_values)
        if slots is not None:
            os.ftruncate(fd, 2 * slots * self._slot_bytes)
        self._memory = memoryview(mmap.mmap(fd, 0))
        self.slots = len(self._memory) // (2 * self._slot_bytes)

    @property
    def inbound(self) -> range:
        return range(self.slots)

    @property
    def outbound(self) -> range:
        return range(self.slots, 2 * self.slots)

    def slot(self, number: int) -> memoryview:
        """Raises IndexError."""
        if not 0 <= number < 2 * self.slots:
            raise IndexError(f"no slot {number}; there are {2 * self.slots}")
        return self._memory[number * self._slot_bytes : (number + 1) * self._slot_bytes]

    def size(self, number: int) -> float:
        """Root mean square of the values in a slot; infinite where they cannot be decoded."""
        codes = self.slot(number)
        if not self._codec.validate(codes_as_tensor(codes)):
            return math.inf
        return root_mean_square(codes, self._codec, self._num_values)

    def distances(self, boundaries: Sequence[bytes]) -> list[float]:
        """How far each two of these are apart, in the order of `combinations`."""
        pairs = itertools.combinations(map(codes_as_tensor, boundaries), 2)
        return [relative_distance(*pair, self._codec, self._num_values) for pair in pairs]
