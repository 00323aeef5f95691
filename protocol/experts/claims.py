"""Claims of experts on texts: how log-probabilities travel, and what no honest one would claim.

A claim is of the first blocks that fit into MAX_LOG_PROBS_BYTES as fp16. It travels as fp32 where
that fits, too, so that an ensemble's loss is the same wherever it is computed; as fp16 else, whose
rounding moves a loss of some thousand tokens by less than 1e-5.

A liar can claim certainty of every token, and would lead any ensemble. What is not a logarithm of a
probability is refused here. Beyond that a claim is checked by computing a block of it with the same
weights (`differs`); a peer without such weights cannot check it, and says so.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_LOG_PROBS_BYTES

Values = npt.NDArray[np.float32]
LEAST: Final = float(np.finfo(np.float16).min)
"""A text that is less likely than that has no likelihood."""
DIFFERENCE_NATS: Final = 0.05
"""Nats per token between two machines with the same weights: several times what bfloat16 makes."""


def claimed_blocks(blocks: int, context_length: int) -> int:
    """How many of the held-out blocks a claim is of: at least one."""
    return max(1, min(blocks, MAX_LOG_PROBS_BYTES // (2 * context_length)))


def packed(log_probs: npt.NDArray[Any]) -> bytes:
    """A claim as it travels."""
    values = np.clip(log_probs, LEAST, 0.0).astype(_dtype(log_probs.size))
    data: bytes = values.tobytes()
    return data


def _dtype(count: int) -> str:
    return "<f4" if 4 * count <= MAX_LOG_PROBS_BYTES else "<f2"


def unpacked(data: bytes, count: int) -> Values:
    """A claim of `count` tokens. Raises RemoteProtocolError: no honest claim looks like that."""
    dtype = np.dtype(_dtype(count))
    if len(data) != count * dtype.itemsize:
        raise RemoteProtocolError(f"{len(data)} bytes of log-probabilities for {count} tokens")
    values = np.frombuffer(data, dtype).astype(np.float32)
    if not (np.isfinite(values) & (values <= 0)).all():
        raise RemoteProtocolError("log-probabilities that are above 0, or not finite")
    return values


def differs(claimed: npt.NDArray[Any], computed: npt.NDArray[Any]) -> bool:
    """Whether a claim of a block is not what its weights say."""
    apart = np.abs(claimed - computed, dtype=np.float64)
    return float(apart.mean()) > DIFFERENCE_NATS
