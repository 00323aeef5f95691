"""Shared memory for boundaries: slots that the daemon fills, and slots that the trainer fills.

Slots 0 to n - 1 are inbound (the daemon writes, the trainer reads), n to 2 n - 1 outbound. A slot
belongs to its writer until it is named in a message, then to its reader until that gives it back.
What others have sent is measured in its slot, before the trainer is told of it: a boundary that
cannot be decoded is its sender's fault, and one of a size that cannot be right goes another way
(protocol/microbatch/sizes.py).
"""

import math
import mmap
import os
from math import prod
from typing import Final, Self

from peer.codec import BLOCK, Codec, codes_as_tensor
from peer.codec.base import root_mean_square
from protocol.run.run_spec import RunSpec
from protocol.run.ways import CODECS

# --- sizes on which daemon and trainer agree: of boundaries, and of the memory for them -----------

SLOTS: Final = 4
"""Microbatches that a machine is taken to hold at once, where its memory is not known."""
MIN_SLOTS: Final = 2
MAX_SLOTS: Final = 8
"""More would hide longer ways than the internet has, and cost memory for boundaries."""
RING_PER_SLOT: Final = 2
"""Slots of a ring, each way, for each: a boundary may wait while another is under way."""


def boundary_shape(spec: RunSpec) -> tuple[int, int, int]:
    """Sequences of a microbatch, tokens, and width of the model."""
    return spec.microbatch_sequences, spec.model.context_length, spec.model.hidden_size


def boundary_bytes(spec: RunSpec) -> int:
    """Bytes of one boundary of a run, coded."""
    return CODECS[spec.pipeline.codec].code_bytes(prod(boundary_shape(spec)))


# --- ring -----------------------------------------------------------------------------------------


class BoundaryRing:
    """The slots of both directions, in one shared memory.

    Args:
        slots: of each direction.
        slot_bytes: of one boundary, coded.
        codec: in which boundaries are; None where nobody asks how large they are.
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

    def size(self, number: int) -> float:
        """Root mean square of the values in a slot; infinite where they cannot be decoded.

        It takes less time than checking that they can.
        """
        if self._codec is None:
            return 0.0
        codes = codes_as_tensor(self.slot(number))
        if not self._codec.validate(codes):
            return math.inf
        num_values = self.slot_bytes // sum(self._codec.planes) * BLOCK
        return root_mean_square(codes, self._codec, num_values)
