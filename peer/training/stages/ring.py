"""Shared memory for boundaries: slots that the daemon fills, and slots that the trainer fills.

Slots 0 to n - 1 are inbound (the daemon writes, the trainer reads), n to 2 n - 1 outbound. A slot
belongs to its writer until it is named in a message, then to its reader until that gives it back.
Nobody checks this memory: both ends are ours, and each boundary is checked by its codec when it is
decoded.
"""

import mmap
import os
from typing import Self


class BoundaryRing:
    """See the top of the file.

    Args:
        slots: of each direction.
        slot_bytes: of one boundary, coded.
    """

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._memory = memoryview(mmap.mmap(fd, 2 * slots * slot_bytes))

    @classmethod
    def create_in(cls, fd: int, slots: int, slot_bytes: int) -> Self:
        """Empty slots in memory of whatever size."""
        os.ftruncate(fd, 2 * slots * slot_bytes)
        return cls(fd, slots, slot_bytes)

    @classmethod
    def open(cls, fd: int, slot_bytes: int) -> Self:
        """The memory that the other end has made, of as many slots as there are."""
        return cls(fd, os.fstat(fd).st_size // (2 * slot_bytes), slot_bytes)

    def __repr__(self) -> str:
        return f"<BoundaryRing of twice {self.slots} slots, {self.slot_bytes} bytes each>"

    @property
    def inbound(self) -> range:
        """Numbers of the slots that the daemon fills."""
        return range(self.slots)

    @property
    def outbound(self) -> range:
        """Numbers of the slots that the trainer fills."""
        return range(self.slots, 2 * self.slots)

    def slot(self, number: int) -> memoryview:
        """The bytes of a slot. Raises IndexError."""
        if not 0 <= number < 2 * self.slots:
            raise IndexError(f"no slot {number}; there are {2 * self.slots}")
        return self._memory[number * self.slot_bytes : (number + 1) * self.slot_bytes]
