"""int8 codes in few bits, for a receiver that holds codes near them. Nothing is lost.

Idea. Two replicas differ by little, so the receiver needs only the low bits of a code k: its own
value tells about where k lies. (Moniqua, arXiv 2002.11787, sends low bits of weights too, and
trusts that they suffice.) For a block that is sent in w bits, with the sender's scale s:

    n = round(receiver's own value / s)           at most 127 either way; 0 where s is 0 or w is 8
    k = the number nearest n, from n - 2**(w-1) on, whose low w bits are those that came

That is right if -2**(w-1) <= k - n < 2**(w-1). Else it is wrong by a multiple of 2**w, a *wrong
wrap*, and two things catch it:

- Two bytes per block: with h = k >> w, which did not travel, the sums of g**i h_i and g**2i h_i
  over the places i, modulo 251 (g = 6 is a primitive root). They are a Reed-Solomon code of
  distance 3: one wrong value or two never pass (with w > 0). More of them pass as numbers drawn by
  lot would, one block in 63,001. A block that fails, or in which a code is beyond 127, is *bad*.
- The digest of all codes (blake3, 128 bits), which the receiver compares when no block is bad:
  other codes pass with a chance of 2**-128.

Both ends average with the same numbers as if the codes had travelled. Bad blocks are asked for as
they are (protocol/gossip/exchange.py).

    pack      widths, 1 byte a block; scales, 2; sums, 2; then bit 0 of all values of the blocks of
              width above 0 (16 bytes a block, the first value in the highest bit), then bit 1 of
              those of width above 1, and so on up to bit 7. Of two vectors, one after the other

A block in w bits takes 16 w + 5 bytes, where its int8 code takes 130. The sender guesses the width
(`expected_after`): how far its last partners were there, times `MARGIN`. A width too small costs
the block again; a width too large a few bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from . import BLOCK, TILE
from .codecs import LARGEST_CODE

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

MARGIN: Final = 1.5
FADING: Final = 0.8
"""How much of an expectation an exchange leaves: some rows of an embedding move now and then."""
LARGEST_WIDTH: Final = 8
_HEAD_BYTES: Final = 5
_PLANE_BYTES: Final = BLOCK // 8
_PRIME: Final = 251
_WEIGHTS: Final = np.array(
    [[pow(6, i, _PRIME), pow(6, 2 * i, _PRIME)] for i in range(BLOCK)], np.float32
)


class MalformedPack(ValueError): ...


@dataclass(frozen=True, slots=True)
class _CodedBlocks:
    """Views of the codes [blocks, 128] and scales [blocks] of one vector."""

    codes: npt.NDArray[np.int8]
    scales: npt.NDArray[np.uint16]

    def tiles(self) -> Iterator[slice]:
        blocks, rows = len(self.scales), TILE // BLOCK
        for first in range(0, blocks, rows):
            yield slice(first, min(first + rows, blocks))

    def scale_of(self, tile: slice) -> Floats:
        """fp32 [blocks, 1]."""
        return _scale_from(self.scales[tile])


def _scale_from(halves: npt.NDArray[np.uint16]) -> Floats:
    return (halves.astype(np.uint32) << 16).view(np.float32)[:, None]


def _vectors(payload: Any, vectors: int) -> list[_CodedBlocks]:
    flat: Bytes = np.frombuffer(payload, np.uint8)
    size = flat.size // vectors
    blocks, rest = divmod(size, BLOCK + 2)
    if rest or size * vectors != flat.size:
        raise ValueError(f"{flat.size} bytes are no {vectors} vectors of int8 codes")
    parts = (flat[start : start + size] for start in range(0, flat.size, size or 1))
    return [
        _CodedBlocks(
            part[: blocks * BLOCK].view(np.int8).reshape(-1, BLOCK),
            part[blocks * BLOCK :].view(np.uint16),
        )
        for part in parts
    ]


def apart_per_block(own: Any, theirs: Any, vectors: int = 1) -> Floats:
    """The largest difference of two peers' values in each block, fp32 [vectors * blocks].

    At most our own largest value: with that a block is sent whole.
    """
    found: list[Floats] = []
    for one, other in zip(_vectors(own, vectors), _vectors(theirs, vectors), strict=True):
        for tile in one.tiles():
            mine = one.codes[tile] * one.scale_of(tile)
            mine -= other.codes[tile] * other.scale_of(tile)
            most = LARGEST_CODE * one.scale_of(tile)[:, 0]
            found.append(np.minimum(np.abs(mine, out=mine).max(axis=1), most))
    return np.concatenate(found) if found else np.zeros(0, np.float32)


def expected_after(apart: Floats, before: Floats | None) -> Floats:
    """How far the next partner is expected to be in each block, if the last was so far apart.

    A quiet block may wake, so at least the mean of all is expected.
    """
    mean = np.float32(apart.mean(dtype=np.float64)) if apart.size else np.float32(0)
    expected: Floats = np.maximum(apart, mean)
    return expected if before is None else np.maximum(expected, np.float32(FADING) * before)


def widths_for(own: Any, expected: Floats, vectors: int = 1) -> Bytes:
    """Bits that each block needs if the receiver is as far away as expected."""
    scales = np.concatenate([v.scales for v in _vectors(own, vectors)])
    scale = _scale_from(scales)[:, 0]
    with np.errstate(all="ignore"):
        steps = MARGIN * expected / scale + np.float32(0.5)
    steps = np.nan_to_num(steps, nan=0.0, posinf=255.0)
    widths = np.ceil(np.log2(np.clip(steps, 0, 255) + 1)) + 1
    widths[scale == 0] = 0
    narrow: Bytes = np.minimum(widths, LARGEST_WIDTH).astype(np.uint8)
    return narrow


def packed_bytes(widths: Bytes) -> int:
    return _HEAD_BYTES * widths.size + _PLANE_BYTES * int(widths.sum(dtype=np.int64))


def pack(own: Any, widths: Bytes, vectors: int = 1) -> bytearray:
    out = np.zeros(packed_bytes(widths), np.uint8)
    start = 0
    parts = _vectors(own, vectors)
    for vector, width in zip(parts, widths.reshape(vectors, -1), strict=True):
        size = packed_bytes(width)
        _pack_one(vector, width, out[start : start + size])
        start += size
    return bytearray(out.data)


def _pack_one(vector: _CodedBlocks, widths: Bytes, out: Bytes) -> None:
    blocks = widths.size
    out[:blocks] = widths
    out[blocks : 3 * blocks] = vector.scales.view(np.uint8)
    sums = out[3 * blocks : _HEAD_BYTES * blocks].reshape(-1, 2)
    places = _plane_places(widths)
    for tile in vector.tiles():
        codes, width = vector.codes[tile], widths[tile]
        sums[tile] = _sums(codes, width)
        for bit in range(int(width.max(initial=0))):
            with_bit = width > bit
            chosen = codes if with_bit.all() else codes[with_bit]
            rows = np.packbits(chosen & _BITS[bit], axis=1).reshape(-1)
            out[places[bit] : places[bit] + rows.size] = rows
            places[bit] += rows.size


def _plane_places(widths: Bytes) -> list[int]:
    places = [_HEAD_BYTES * widths.size]
    for bit in range(LARGEST_WIDTH):
        places.append(places[-1] + _PLANE_BYTES * int((widths > bit).sum()))
    return places


_BITS: Final = np.array([1 << bit for bit in range(8)], np.uint8).view(np.int8)


def _sums(codes: npt.NDArray[Any], widths: Bytes) -> Bytes:
    """The two check bytes of each block; exact in fp32, for sums are small."""
    high = (codes.astype(np.int16) >> widths[:, None]).astype(np.float32)
    sums: Bytes = np.mod(high @ _WEIGHTS, _PRIME).astype(np.uint8)
    return sums


def unpack(packed: Any, own: Any, into: Any, vectors: int = 1) -> npt.NDArray[np.bool_]:
    """Write the sender's int8 codes into `into`. Returns which blocks are bad.

    Raises MalformedPack.
    """
    flat: Bytes = np.frombuffer(packed, np.uint8)
    start, bad = 0, []
    for mine, theirs in zip(_vectors(own, vectors), _vectors(into, vectors), strict=True):
        blocks = len(mine.scales)
        widths = flat[start : start + blocks]
        if widths.size < blocks or int(widths.max(initial=0)) > LARGEST_WIDTH:
            raise MalformedPack(f"no widths of {blocks} blocks")
        size = packed_bytes(widths)
        if start + size > flat.size:
            raise MalformedPack(f"{flat.size} bytes, which end before the codes do")
        bad.append(_unpack_one(flat[start : start + size], widths, mine, theirs))
        start += size
    if start != flat.size:
        raise MalformedPack(f"{flat.size} bytes where codes take {start}")
    return np.concatenate(bad)


def _unpack_one(
    flat: Bytes, widths: Bytes, mine: _CodedBlocks, theirs: _CodedBlocks
) -> npt.NDArray[np.bool_]:
    blocks = widths.size
    theirs.scales.view(np.uint8)[:] = flat[blocks : 3 * blocks]
    sums = flat[3 * blocks : _HEAD_BYTES * blocks].reshape(-1, 2)
    places, bad = _plane_places(widths), np.zeros(blocks, np.bool_)
    for tile in mine.tiles():
        width = widths[tile]
        low = np.zeros((width.size, BLOCK), np.uint8)
        for bit in range(int(width.max(initial=0))):
            with_bit = width > bit
            size = int(with_bit.sum()) * _PLANE_BYTES
            plane = flat[places[bit] : places[bit] + size].reshape(-1, _PLANE_BYTES)
            bits = np.unpackbits(plane, axis=1)
            bits <<= np.uint8(bit)
            if len(plane) == len(low):
                low |= bits
            else:
                low[with_bit] |= bits
            places[bit] += size
        codes = _nearest(low, width, _guess(mine, theirs, tile, width))
        beyond = (np.abs(codes) > LARGEST_CODE).any(axis=1)
        bad[tile] = beyond | (_sums(codes, width) != sums[tile]).any(axis=1)
        theirs.codes[tile] = np.clip(codes, -LARGEST_CODE, LARGEST_CODE)
    return bad


def _guess(
    mine: _CodedBlocks, theirs: _CodedBlocks, tile: slice, widths: Bytes
) -> npt.NDArray[np.int16]:
    """n: our own value in the sender's scale."""
    with np.errstate(all="ignore"):
        ratio = mine.scale_of(tile) / theirs.scale_of(tile)
        steps = mine.codes[tile] * np.nan_to_num(ratio, nan=0.0, posinf=0.0, neginf=0.0)
    steps[widths == LARGEST_WIDTH] = 0
    guess: npt.NDArray[np.int16] = np.clip(np.rint(steps), -127, 127).astype(np.int16)
    return guess


def _nearest(low: Bytes, widths: Bytes, guess: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """The numbers with these low bits that are nearest to the guesses."""
    modulus = np.left_shift(np.int16(1), widths.astype(np.int16))[:, None]
    half = modulus >> 1
    nearest: npt.NDArray[np.int16] = guess + ((low - guess + half) & (modulus - 1)) - half
    return nearest


def codes_of_blocks(own: Any, wanted: npt.NDArray[np.bool_], vectors: int = 1) -> bytes:
    each = zip(_vectors(own, vectors), wanted.reshape(vectors, -1), strict=True)
    return b"".join(vector.codes[marks].tobytes() for vector, marks in each)


def put_blocks(into: Any, wanted: npt.NDArray[np.bool_], codes: Any, vectors: int = 1) -> None:
    rows = np.frombuffer(codes, np.int8).reshape(-1, BLOCK)
    for vector, marks in zip(_vectors(into, vectors), wanted.reshape(vectors, -1), strict=True):
        count = int(marks.sum())
        vector.codes[marks] = rows[:count]
        rows = rows[count:]


def blocks_of(payload_bytes: int) -> int:
    return payload_bytes // (BLOCK + 2)
