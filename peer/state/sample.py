"""Samples of weights as bytes, and what they say of a state (protocol/state_sample.py)."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from peer.training.ports import Float32Vector
from protocol.errors import RemoteProtocolError
from protocol.state_sample import BLOCK_VALUES, SAMPLE_BYTES, block_starts, is_odd


def sample_of(vector_P: Float32Vector, seed: bytes) -> Float32Vector:
    """The values at the places that follow from the seed, block after block."""
    starts = block_starts(seed, vector_P.size)
    return np.concatenate([vector_P[start : start + BLOCK_VALUES] for start in starts])


def sample_from(data: bytes) -> Float32Vector:
    """A sample that was sent.

    Raises:
        RemoteProtocolError: it has another length, or values that are not finite.
    """
    if len(data) != SAMPLE_BYTES:
        raise RemoteProtocolError(f"a sample of {len(data)} bytes, expected {SAMPLE_BYTES}")
    values: Float32Vector = np.frombuffer(data, "<f4")
    if not np.isfinite(values).all():
        raise RemoteProtocolError("a sample with values that are not finite")
    return values


def blocks_of(sample: Float32Vector, blocks: Sequence[int]) -> Float32Vector:
    """The values of a sample in these of its blocks."""
    values: Float32Vector = sample.reshape(-1, BLOCK_VALUES)[list(blocks)].ravel()
    return values


def is_unlike(sample: Float32Vector, witnesses: Sequence[Float32Vector]) -> bool:
    """Whether the state that a sample is of is unlike those of its witnesses."""
    to_witnesses = [_rms(sample - witness) for witness in witnesses]
    among = [_rms(one - other) for one, other in combinations(witnesses, 2)]
    return is_odd(to_witnesses, among, _rms(sample))


def _rms(values: npt.NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
