"""A peer's whole outer state as one file, and its way to a joiner.

A state is a run of bytes, cut into chunks of `STATE_CHUNK_BYTES`:

    header (4096 bytes): magic, length, msgpack of the scalars, zeros
    phi, fp32 [P]
    delta, fp32 [P]

Numbers are little-endian. Chunks are asked for by the root, the digest of all chunks' digests; the
scalars are in the first chunk, so the root names a whole state.

Rules:
- A file is renamed when it is whole and on the disk: a reader reads one state.
- A joiner checks each chunk on arrival, from any peer and in any order; at the end it compares the
  scalars in the header with those it was told.
- No size is a peer's word: the joiner knows P, and refuses another.
"""

import os
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgpack
import numpy as np
from msgspec.structs import asdict

from peer.runtime.files import private, sync_folder
from protocol.content.manifest import digest_of
from protocol.content.samples import Float32Vector
from protocol.errors import RemoteProtocolError
from protocol.limits import STATE_CHUNK_BYTES
from protocol.wire.content_messages import StateScalars

HEADER_BYTES: Final = 4096
SUFFIX: Final = ".state"
_PARTIAL_SUFFIX: Final = ".state-partial"
_MAGIC: Final = b"LOCOST01"
_LITTLE: Final = np.dtype("<f4")
_ZEROS: Final = bytes(STATE_CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class StateManifest:
    digests: tuple[bytes, ...]
    scalars: StateScalars

    @property
    def root(self) -> str:
        return digest_of(b"".join(self.digests)).hex()

    def check(self, num_values: int) -> None:
        expected = chunk_count(state_bytes(num_values))
        if len(self.digests) != expected:
            raise RemoteProtocolError(f"a state of {len(self.digests)} chunks, expected {expected}")


def state_bytes(num_values: int) -> int:
    return HEADER_BYTES + 2 * num_values * _LITTLE.itemsize


def chunk_count(total_bytes: int) -> int:
    return -(-total_bytes // STATE_CHUNK_BYTES)


def chunk_bytes(index: int, total_bytes: int) -> int:
    return min(STATE_CHUNK_BYTES, total_bytes - index * STATE_CHUNK_BYTES)


def weights_chunk(value: int) -> int:
    return (HEADER_BYTES + value * _LITTLE.itemsize) // STATE_CHUNK_BYTES


def units_of(num_values: int) -> list[int]:
    """For each chunk of a state the chunk of weights that it belongs with.

    A chunk of momentum belongs with the weights of its middle: momentum is not cut where weights
    are, and these are the weights of half of its values at least.
    """
    total, units = state_bytes(num_values), list[int]()
    for index in range(chunk_count(total)):
        start = index * STATE_CHUNK_BYTES
        middle = (start + min(start + STATE_CHUNK_BYTES, total)) // 2
        value = (middle - HEADER_BYTES) // _LITTLE.itemsize - num_values
        own = weights_chunk(value) if value >= 0 else index
        units.append(units[own] if own < index else index)
    return units


def copy_state(
    path: Path, scalars: StateScalars, phi_P: Float32Vector, delta_P: Float32Vector
) -> None:
    """Copy a state to a file beside `path`, which `seal_state` then makes a state file.

    phi and delta, fp32 [P], must not change meanwhile, so digests and fsync are left to
    `seal_state`. Chunks of zeros become holes in the file. Raises ValueError, OSError.
    """
    partial = _partial(path)
    try:
        with open(partial, "wb", opener=private) as file:
            for chunk in StateMemory(phi_P, delta_P, scalars).chunks():
                if chunk == _ZEROS:
                    file.seek(len(chunk), os.SEEK_CUR)
                else:
                    file.write(chunk)
            file.truncate()
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def seal_state(path: Path, scalars: StateScalars) -> StateManifest:
    """Make a copied state the file at `path`, durably. Raises OSError: `path` is as it was."""
    partial = _partial(path)
    digests = []
    try:
        with partial.open("rb") as file:
            while chunk := file.read(STATE_CHUNK_BYTES):
                digests.append(digest_of(chunk))
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)
    return StateManifest(tuple(digests), scalars)


def write_state(
    path: Path, scalars: StateScalars, phi_P: Float32Vector, delta_P: Float32Vector
) -> StateManifest:
    """Write a state whose vectors, fp32 [P], lie still. Raises as `copy_state`."""
    copy_state(path, scalars, phi_P, delta_P)
    return seal_state(path, scalars)


def _partial(path: Path) -> Path:
    return path.with_suffix(_PARTIAL_SUFFIX)


def read_chunk(path: Path, index: int) -> bytes:
    """Raises FileNotFoundError: a newer state has replaced the file."""
    with path.open("rb") as file:
        file.seek(index * STATE_CHUNK_BYTES)
        return file.read(STATE_CHUNK_BYTES)


def remove_state_files(directory: Path, keep: Collection[Path]) -> None:
    """Remove state files, those that crashes left half-written too, except `keep`."""
    for suffix in (SUFFIX, _PARTIAL_SUFFIX):
        for path in directory.glob(f"*{suffix}"):
            if path not in keep:
                path.unlink(missing_ok=True)


class StateMemory:
    """A state as one run of bytes: a header and the caller's vectors, not copied.

    A joiner that held the 8 P bytes twice would need more memory than ever again. The vectors hold
    a state once the header was checked.

    Args:
        scalars: of the state that the vectors hold; None where they hold none yet.
    """

    def __init__(
        self, phi_P: Float32Vector, delta_P: Float32Vector, scalars: StateScalars | None = None
    ) -> None:
        """Raises ValueError: the vectors are not contiguous fp32 of one length."""
        if phi_P.shape != delta_P.shape or phi_P.ndim != 1:
            raise ValueError(
                f"phi {phi_P.shape} and delta {delta_P.shape} must be vectors of one length"
            )
        self.total_bytes = state_bytes(phi_P.size)
        self._header = bytearray(HEADER_BYTES if scalars is None else _header(scalars))
        self._parts = [memoryview(self._header), _as_bytes(phi_P), _as_bytes(delta_P)]

    def chunks(self) -> Iterator[bytes]:
        for index in range(chunk_count(self.total_bytes)):
            yield b"".join(self._views(index))

    def put(self, index: int, chunk: bytes) -> None:
        """Put a chunk in its place. Raises RemoteProtocolError: wrong length, or not finite."""
        length, taken = chunk_bytes(index, self.total_bytes), 0
        if len(chunk) != length:
            raise RemoteProtocolError(
                f"chunk {index} of the state has {len(chunk)} bytes, not {length}"
            )
        values = np.frombuffer(chunk, _LITTLE, offset=0 if index else HEADER_BYTES)
        if not np.isfinite(values).all():
            raise RemoteProtocolError(
                f"chunk {index} of the state holds values that are not finite"
            )
        for view in self._views(index):
            view[:] = chunk[taken : taken + view.nbytes]
            taken += view.nbytes

    def put_zeros(self, index: int) -> None:
        """Make a chunk all zeros. Memory that holds zeros already is left untouched."""
        for view in self._views(index):
            held = np.frombuffer(view, np.uint8)
            if held.any():
                held[:] = 0

    def check(self, scalars: StateScalars) -> None:
        """Compare with the header, once all chunks are there. Raises RemoteProtocolError."""
        if self._header != _header(scalars):
            raise RemoteProtocolError("the state's header differs from what was announced")

    def _views(self, index: int) -> Iterator[memoryview]:
        start = index * STATE_CHUNK_BYTES
        stop, offset = start + chunk_bytes(index, self.total_bytes), 0
        for part in self._parts:
            a, b = max(start - offset, 0), min(stop - offset, part.nbytes)
            if a < b:
                yield part[a:b]
            offset += part.nbytes


def _as_bytes(vector: Float32Vector) -> memoryview:
    if vector.dtype != _LITTLE or not vector.flags.c_contiguous:
        raise ValueError(f"expected a contiguous little-endian fp32 vector, not {vector.dtype}")
    return vector.data.cast("B")


def _header(scalars: StateScalars) -> bytes:
    body: bytes = msgpack.packb(asdict(scalars))
    header = _MAGIC + struct.pack("<I", len(body)) + body
    if len(header) > HEADER_BYTES:
        raise ValueError(f"the scalars take {len(header)} bytes; {HEADER_BYTES} are there")
    return header.ljust(HEADER_BYTES, b"\0")
