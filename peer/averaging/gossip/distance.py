"""How far a partner's vector is from ours, before anything is done with it: one pass over both."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from peer.codec import BLOCK, TILE, Codec
from peer.codec.compiled import in_chunks

LOOPS_OF: Final = "noloco"
"""The loops that read two vectors of codes stand with this way's (protocol/run/codecs.py)."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Root mean squares per value; not finite where a sum is not.

    Attributes:
        distance: of ours less theirs.
        own: of ours.
    """

    distance: float
    own: float


def apart(
    own_codes: Sequence[torch.Tensor], their_codes: Sequence[torch.Tensor], codec: Codec, size: int
) -> Apart:
    """The distance of two peers' vectors.

    Args:
        own_codes, their_codes: one vector each, or more that belong together; valid ones.
        size: values of one vector.
    """
    distance = own = 0.0
    for ours, theirs in zip(own_codes, their_codes, strict=True):
        squares = _fused_squares(ours, theirs, codec, size) or _squares(ours, theirs, codec, size)
        distance, own = distance + squares[0], own + squares[1]
    values = max(1, size * len(own_codes))
    return Apart(_root(distance / values), _root(own / values))


def _fused_squares(
    ours: torch.Tensor, theirs: torch.Tensor, codec: Codec, size: int
) -> tuple[float, float] | None:
    """The same by a compiled loop, in a quarter of the time; None where none fits."""
    fused = codec.fused_loops(LOOPS_OF, (ours, theirs), ())
    if fused is None:
        return None
    arrays = (*fused.codes[0], *fused.codes[1])
    sums = in_chunks(
        lambda first, last: fused.kernels.apart_blocks(*arrays, first, last), size // BLOCK
    )
    return sum(distance for distance, _ in sums), sum(own for _, own in sums)


def _squares(
    ours: torch.Tensor, theirs: torch.Tensor, codec: Codec, size: int
) -> tuple[float, float]:
    """Sums of squares, of ours less theirs and of ours, tile by tile."""
    scratch = torch.empty(2, min(TILE, size), dtype=torch.float32, device=ours.device)
    distance = own = 0.0
    for start in range(0, size, TILE):
        stop = min(size, start + TILE)
        one, other = scratch[:, : stop - start]
        codec.decode_range(ours, start, stop, one)
        codec.decode_range(theirs, start, stop, other)
        own += float(torch.dot(one, one))
        one.sub_(other)
        distance += float(torch.dot(one, one))
    return distance, own


def _root(mean_square: float) -> float:
    return math.sqrt(mean_square) if mean_square >= 0 else math.nan
