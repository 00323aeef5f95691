"""Memory for codes on their way, used again and again.

Why. Memory of some hundred KiB that is fresh from the kernel is zeroed page by page when it is
first touched, which takes several times longer than to copy the codes there; and what is given back
goes back to the kernel at once. So memory that nobody looks at any more is kept here for the next
who asks.

Rules
  1. It is spare again as soon as the last view of it is gone: nobody has to give anything back.
  2. Of what is spare at most `max_spare_bytes` are kept, the newest.
  3. What is in it when it is handed out is what was there before: it is for who fills all of it.

Also a quick look whether memory still holds what was written there.

Idea. The sum of 64 words of 8 bytes, modulo 2^64, is other after a change of any one of them, and
the digest of the sums in their order is other after a change of any sum. So whatever happens to
single words or whole pages is seen, at the speed of memory, a quarter of the time of a digest of
all bytes. Changes within one block that cancel each other are not seen: against malice it is
nothing, and nothing of it ever leaves this machine. What peers compare are stamps.
"""

import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import blake3
import numpy as np
import numpy.typing as npt
import torch

# --- memory check ---------------------------------------------------------------------------------

_WORDS: Final = 64
"""Summed up at a time: a block of 128 values in fp32."""


def memory_check(vectors: Iterable[torch.Tensor]) -> bytes:
    """The check of fp32 vectors of whole blocks in main memory, in their order."""
    digest = blake3.blake3()
    for vector in vectors:
        words = vector.numpy().view(np.uint64).reshape(-1, _WORDS)
        digest.update(words.sum(axis=1, dtype=np.uint64).view(np.uint8).data)
    return digest.digest(length=16)


# --- spare memory ---------------------------------------------------------------------------------

Memory = npt.NDArray[np.uint8]

MOST_WASTED: Final = 2
"""A piece is used for what needs at least one so-manieth of it."""


class SpareMemory:
    """Hands out memory, and keeps what was used. Any thread may let go of it."""

    def __init__(self, max_spare_bytes: int) -> None:
        self._max_spare_bytes = max_spare_bytes
        self._spare: deque[Memory] = deque()

    @property
    def spare_bytes(self) -> int:
        """What is kept now."""
        return sum(map(len, list(self._spare)))  # a copy: other threads may let go meanwhile

    def take(self, num_bytes: int) -> memoryview:
        """So many bytes, of any content."""
        memory = self._fitting(num_bytes)
        lent = memory[:num_bytes]
        weakref.finalize(lent, self._came_back, memory).atexit = False
        return lent.data

    def _fitting(self, num_bytes: int) -> Memory:
        """One piece that is large enough, but not much too large; new, if there is none."""
        with suppress(IndexError):  # another thread was faster
            for _ in range(len(self._spare)):
                memory = self._spare.popleft()
                if num_bytes <= len(memory) <= MOST_WASTED * num_bytes:
                    return memory
                self._spare.append(memory)
        return np.empty(num_bytes, np.uint8)

    def _came_back(self, memory: Memory) -> None:
        self._spare.append(memory)
        with suppress(IndexError):
            while self.spare_bytes > self._max_spare_bytes:
                self._spare.popleft()
