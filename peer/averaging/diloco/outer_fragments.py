"""The outer copy of a model, fragment by fragment: values, momentum, and what may be undone.

phi and v lie in the caller's memory, in the order of the flat vector, where a chunk lies in one
piece or several; it is stepped where it lies. The state before a chunk's last step is kept in a
second pair of vectors, so that the step can be taken back, or anew with a result that wins. They
are used again with each step: fresh memory costs several times what the step does.

The core of the exchange knows which state each chunk is in, and what may be applied to it
(protocol/diloco/chunk_ledger.py): it is given the stamp that comes of each step.

Everything here is blocking work of some milliseconds per chunk, for one thread at a time.

`SpareMemory` keeps memory for codes on their way. Fresh memory from the kernel is zeroed page by
page when it is first touched, which takes several times longer than to copy the codes there. It is
spare again as soon as the last view of it is gone. At most `max_spare_bytes` are kept, the newest.
It is handed out with any content.

`memory_check` tells whether memory still holds what was written there. The sum of a block's words
of 8 bytes, modulo 2^64, changes with any one of them, and the digest of the sums in their order
with any sum. So every change of single words or whole pages is seen, in a quarter of the time of a
digest of all bytes. Changes within one block that cancel each other are not seen: it is no
protection against malice. Peers compare stamps.
"""

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import blake3
import numpy as np
import numpy.typing as npt
import torch

from peer.codec import BLOCK, Codec, codes_as_tensor, root_mean_square
from peer.codec.compiled import COMPILED_FROM
from protocol.content.samples import Float32Vector
from protocol.diloco import commands
from protocol.diloco.chunk_ledger import NEVER
from protocol.errors import RemoteProtocolError
from protocol.fragment.fragments import Fragment
from protocol.plausible import Plausibility
from protocol.wire.fragment_messages import Stamp

from .nesterov import (
    PLAIN_AVERAGE,
    ChunkValues,
    NesterovFactors,
    state_digest,
    step_pieces,
    vectors_of,
)


# --- memory check ---------------------------------------------------------------------------------
def memory_check(vectors: Iterable[torch.Tensor]) -> bytes:
    """The check of fp32 vectors of whole blocks in main memory."""
    digest = blake3.blake3()
    for vector in vectors:
        words = vector.numpy().view(np.uint64).reshape(-1, BLOCK // 2)
        digest.update(words.sum(axis=1, dtype=np.uint64).view(np.uint8).data)
    return digest.digest(length=16)


# --- spare memory ---------------------------------------------------------------------------------
Memory = npt.NDArray[np.uint8]

MOST_WASTED: Final = 2
"""A piece is used again for what needs at least 1 / MOST_WASTED of it."""


class SpareMemory:
    """Any thread may let go of what it hands out."""

    def __init__(self, max_spare_bytes: int) -> None:
        self._max_spare_bytes = max_spare_bytes
        self._spare: deque[Memory] = deque()

    @property
    def spare_bytes(self) -> int:
        return sum(map(len, list(self._spare)))  # a copy: other threads may let go meanwhile

    def take(self, num_bytes: int) -> memoryview:
        memory = self._fitting(num_bytes)
        lent = memory[:num_bytes]
        weakref.finalize(lent, self._came_back, memory).atexit = False
        return lent.data

    def _fitting(self, num_bytes: int) -> Memory:
        """A piece of memory that is large enough, but not much too large; new, if there is none."""
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


# --- the outer copy -------------------------------------------------------------------------------
FIRST_RESULTS: Final = 2.0
"""How long a chunk's first results may be, in lengths of our own contribution, which is about as
long as others' for as many steps: a mean is not longer."""
FIRST_OF_CHUNK: Final = 16.0
"""That bound in lengths of the chunk, for a peer that has sent nothing: early steps move weights by
more than they are."""


class OuterFragments:
    """phi and v of all fragments; the values must be there.

    Args:
        is_last: whether a cycle is that of the sends after the run's last inner step, which are
            averaged plainly.

    Attributes:
        spare: memory for codes that come and go.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        phi_P: Float32Vector,
        v_P: Float32Vector,
        codec: Codec,
        factors: NesterovFactors,
        is_last: Callable[[int], bool],
    ) -> None:
        self.fragments = tuple(fragments)
        self.codec = codec
        self._factors = factors
        self.is_last = is_last
        self._phi, self._v = torch.from_numpy(phi_P), torch.from_numpy(v_P)
        self._now = self._pieces(self._phi, self._v)
        self._before = self._pieces(torch.empty_like(self._phi), torch.empty_like(self._v))
        self.spare = SpareMemory(self.code_bytes)
        self._sent: dict[int, tuple[memoryview, float]] = {}
        self._seen = defaultdict[tuple[int, int], Plausibility](Plausibility)
        self._checks = {key: memory_check(vectors_of(pieces)) for key, pieces in self._now.items()}

    def first_stamps(self) -> list[list[Stamp]]:
        """The states of all chunks at the start of a run."""
        return [
            [
                self._stamp(fragment.index, chunk, NEVER, 0, 0)
                for chunk in range(len(fragment.chunks))
            ]
            for fragment in self.fragments
        ]

    # --- sizes ------------------------------------------------------------------------------------
    def chunk_values(self, fragment: int, chunk: int) -> int:
        """How many values a chunk has, padding included."""
        start, stop = self.fragments[fragment].chunks[chunk]
        return stop - start

    def chunk_code_bytes(self, fragment: int, chunk: int) -> int:
        return self.codec.code_bytes(self.chunk_values(fragment, chunk))

    @property
    def is_long(self) -> bool:
        return len(self._phi) >= COMPILED_FROM  # compiled loops are worth loading

    @property
    def code_bytes(self) -> int:
        return sum(
            self.chunk_code_bytes(fragment.index, chunk)
            for fragment in self.fragments
            for chunk in range(len(fragment.chunks))
        )

    def split_codes(
        self, fragment: int, chunks: Sequence[int], codes: memoryview
    ) -> dict[int, memoryview]:
        """Codes that lie one after another. Raises RemoteProtocolError: another length."""
        parts, start = {}, 0
        for chunk in chunks:
            stop = start + self.chunk_code_bytes(fragment, chunk)
            parts[chunk] = codes[start:stop]
            start = stop
        if start != len(codes):
            raise RemoteProtocolError(f"{len(codes)} bytes of codes, expected {start}")
        return parts

    # --- what the core orders ---------------------------------------------------------------------
    def carry_out(self, order: commands.WriteOrder) -> Mapping[int, Stamp]:
        """Returns the stamps of what was written, or of chunks that were corrupted."""
        match order:
            case commands.Verify(fragment, cycles):
                return self.verify(fragment, cycles)
            case commands.WriteResults(fragment, results, again):
                return {
                    each.chunk: self.write(fragment, each, again=each.chunk in again)
                    for each in results
                    if self.admit_result(fragment, each, again=each.chunk in again)
                }
            case commands.WriteChunk(_, fetched):
                try:
                    self.heal(fetched)
                except RemoteProtocolError:
                    return {}  # not what its stamp says: another peer will have it
                return {fetched.chunk: fetched.stamp}
            case commands.UndoSteps(fragment, stamps):
                for chunk in stamps:
                    self.undo(fragment, chunk)
                return stamps

    # --- steps ------------------------------------------------------------------------------------
    def write(self, fragment: int, result: commands.ResultArrived, *, again: bool = False) -> Stamp:
        """Step from the present state, or from the one before the last step."""
        factors = PLAIN_AVERAGE if self.is_last(result.cycle) else self._factors
        chunk = fragment, result.chunk
        pieces = list(zip(self._before[chunk], self._now[chunk], strict=True))
        step_pieces(pieces, codes_as_tensor(result.codes), self.codec, factors, keep=not again)
        self._checks[chunk] = self._check(*chunk)
        base = result.of_chunk.base_stamp
        weight = base.weight + result.rank.weight
        return self._stamp(fragment, result.chunk, result.cycle, base.steps + 1, weight)

    def undo(self, fragment: int, chunk: int) -> None:
        key = fragment, chunk
        for now, before in zip(self._now[key], self._before[key], strict=True):
            now.copy_from(before)
        self._checks[key] = self._check(*key)

    def admit_result(
        self, fragment: int, result: commands.ResultArrived, *, again: bool = False
    ) -> bool:
        """Judge how far a result moves its chunk, by recent ones, and remember that if it is taken.

        All have seen the same results, so nearly always all judge the same; else one heals.
        """
        size = self.chunk_values(fragment, result.chunk)
        length = root_mean_square(result.codes, self.codec, size)
        seen, scale = self._seen[fragment, result.chunk], 0.0
        if not seen.has_seen_enough:
            scale = self._first_bound(fragment, result.chunk)
        share = seen.share("", length, scale, expected=scale, instead=again)
        return share is not None

    def sends(self, fragment: int, codes: memoryview, steps_share: float = 1.0) -> None:
        """Note what we contribute: results of a fragment are about as long.

        Args:
            steps_share: our steps, over those of a peer of median speed: a slow peer's contribution
                is shorter.
        """
        self._sent[fragment] = (codes, steps_share)

    def _first_bound(self, fragment: int, chunk: int) -> float:
        """The longest plausible result while few were seen."""
        size = self.chunk_values(fragment, chunk)
        if fragment in self._sent:
            sent, steps_share = self._sent[fragment]
            chunks = range(len(self.fragments[fragment].chunks))
            codes = self.split_codes(fragment, chunks, sent)[chunk]
            if steps_share and (ours := root_mean_square(codes, self.codec, size)):
                return FIRST_RESULTS * ours / steps_share
        vectors = [piece.phi_C for piece in self._now[fragment, chunk]]
        length = math.sqrt(sum(float(torch.dot(each, each)) for each in vectors) / size)
        return FIRST_OF_CHUNK * length or math.inf

    # --- whole chunks -----------------------------------------------------------------------------
    def read(self, fragment: int, chunk: int) -> bytes:
        """phi and v of a chunk, fp32, one after the other."""
        vectors = vectors_of(self._now[fragment, chunk])
        return b"".join(vector.numpy().tobytes() for vector in vectors)

    def heal(self, fetched: commands.ChunkFetched) -> None:
        """Take over a chunk. Raises RemoteProtocolError: it is not that of its stamp."""
        fragment, chunk, stamp = fetched.fragment, fetched.chunk, fetched.stamp
        size = self.chunk_values(fragment, chunk)
        if len(fetched.values) != 8 * size:
            expected = f"expected {8 * size}"
            raise RemoteProtocolError(f"{len(fetched.values)} bytes of a chunk, {expected}")
        both = torch.from_numpy(np.frombuffer(fetched.values, "<f4").copy())
        state = ChunkValues(both[:size], both[size:])
        if _stamp([state], chunk, fetched.cycle, stamp.steps, stamp.weight) != stamp:
            raise RemoteProtocolError("a chunk's values do not fit its stamp")
        if not bool(torch.isfinite(both).all()):
            raise RemoteProtocolError("a chunk's values are not finite")
        done = 0
        for piece in self._now[fragment, chunk]:
            stop = done + len(piece.phi_C)
            piece.copy_from(ChunkValues(state.phi_C[done:stop], state.v_C[done:stop]))
            done = stop
        self._checks[fragment, chunk] = self._check(fragment, chunk)

    def verify(self, fragment: int, cycles: Sequence[int]) -> dict[int, Stamp]:
        """Chunks that are no longer what was written: their memory is corrupted.

        Under the stamps that are returned, which are behind all others', they are left out of the
        averages, and healed.
        """
        corrupted = {}
        for chunk, cycle in enumerate(cycles):
            now = self._check(fragment, chunk)
            if now != self._checks[fragment, chunk]:
                self._checks[fragment, chunk] = now
                corrupted[chunk] = self._stamp(fragment, chunk, cycle, 0, 0)
        return corrupted

    def fitting(
        self, fragment: int, states: Iterable[tuple[int, Stamp]]
    ) -> list[tuple[int, Stamp]]:
        """The stamps among these, each with its cycle, that the values here have."""
        return [
            (cycle, stamp)
            for cycle, stamp in states
            if self._stamp(fragment, stamp.chunk, cycle, stamp.steps, stamp.weight) == stamp
        ]

    # --- memory -----------------------------------------------------------------------------------
    def _pieces(
        self, phi_P: torch.Tensor, v_P: torch.Tensor
    ) -> dict[tuple[int, int], list[ChunkValues]]:
        """The pieces of each chunk of each fragment in a pair of vectors."""
        return {
            (fragment.index, chunk): [
                ChunkValues(phi_P[start:stop], v_P[start:stop])
                for start, stop in fragment.chunk_spans(chunk)
            ]
            for fragment in self.fragments
            for chunk in range(len(fragment.chunks))
        }

    def _stamp(self, fragment: int, chunk: int, cycle: int, steps: int, weight: int) -> Stamp:
        return _stamp(self._now[fragment, chunk], chunk, cycle, steps, weight)

    def _check(self, fragment: int, chunk: int) -> bytes:
        return memory_check(vectors_of(self._now[fragment, chunk]))


def _stamp(pieces: Sequence[ChunkValues], chunk: int, cycle: int, steps: int, weight: int) -> Stamp:
    return Stamp(chunk, steps, weight, state_digest(pieces, cycle, steps, weight))
