"""Shared memory for boundaries: slots that the daemon fills, and slots that the trainer fills.

Slots 0 to n - 1 are inbound (the daemon writes, the trainer reads), n to 2 n - 1 outbound. A slot
belongs to its writer until it is named in a message, then to its reader until that gives it back.
What others have sent is checked in its slot, before the trainer is told of it: a boundary that
cannot be decoded is its sender's fault, and costs nobody but the sender a microbatch.
"""

import mmap
import os
from typing import Self

from peer.codec import Codec, codes_as_tensor


class BoundaryRing:
    """See the top of the file.

    Args:
        slots: of each direction.
        slot_bytes: of one boundary, coded.
        codec: in which boundaries are; None where nobody asks whether they are sound.
    """

    def __init__(self, fd: int, slots: int, slot_bytes: int, codec: Codec | None = None) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._codec = codec
        self._memory = memoryview(mmap.mmap(fd, 2 * slots * slot_bytes))

    @classmethod
    def create_in(cls, fd: int, slots: int, slot_bytes: int) -> Self:
        """Empty slots in memory of whatever size."""
        os.ftruncate(fd, 2 * slots * slot_bytes)
        return cls(fd, slots, slot_bytes)

    @classmethod
    def open(cls, fd: int, slot_bytes: int, codec: Codec | None = None) -> Self:
        """The memory that the other end has made, of as many slots as there are."""
        return cls(fd, os.fstat(fd).st_size // (2 * slot_bytes), slot_bytes, codec)

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

    def is_sound(self, number: int) -> bool:
        """Whether what lies in a slot can be decoded, to values that are finite."""
        return self._codec is None or self._codec.validate(codes_as_tensor(self.slot(number)))
