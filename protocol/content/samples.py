"""Samples and losses of others' states, by which a joiner judges the state that it was given.

A sample of weights. A state's root proves that all of it is what its source wrote, not that the
source trains what the others train. Replicas of one model lie close together; a lie about all
weights does not. A joiner compares the values at some places with those of *witnesses*.

Rules
  1. The places follow from a seed that only the joiner knows until the source has named the root of
     its state: a source cannot make a state that is right at these places alone.
  2. Witnesses are asked at that moment: later, over a slow line, the state would look old.
  3. A state is *odd* when it is further from each witness than FACTOR times what witnesses are
     apart, and than FLOOR times its own length. One liar of two witnesses can make it look good,
     not bad. Without two witnesses nothing can be told.
  4. A state that is mixed of several replicas' chunks has witnesses and places for the root of
     each. A source's part is compared at those of its places that lie in its own chunks, if these
     are LEAST_BLOCKS or more. Then the whole is compared at the places of the leader.

A lie about few of the weights, or within FLOOR, is not seen; averaging bounds those (plausible.py).

A loss. One norm ten times as large, or one row of the embedding, ruins a model too, and a sample
may miss it. All peers measure their loss on the same held-out blocks and tell it in their beats; a
joiner measures that of the state that it was given.
  5. The beats of other peers that train and are trusted (membership/view.py) count, except the
     source's. They are read when the source has named its root, as in rule 2.
  6. A state is *worse* when its loss is above LOSS_FACTOR times the middle of theirs and LOSS_FLOOR
     more, or no number. Theirs are some rounds old, hence higher while losses fall fast.
  7. Without two others nothing can be told. The middle of two is the higher.

A mean of several states, for an export. All are measured on the same blocks by one machine.
  8. A state counts in the mean by its loss: e times less for each MEAN_NATS that it is worse than
     the best, and not at all where it is that much worse than the middle (of two the better), or
     no number. Replicas are better averaged than apart; one with which the loss of the mean is
     above the mean of the losses (by more than ROUNDING_NATS) is no replica, and does not count
     either: weights with a good loss can be far from all others, such as those with the hidden
     units in another order. Our own, which nobody forges, come first.

A state that is worse by less is not seen, nor one that is better on the held-out blocks than it
deserves. Liars in the majority that tell low losses keep a joiner out.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import median_high, median_low
from typing import Any, Final

import blake3
import numpy as np
import numpy.typing as npt

from protocol.errors import RemoteProtocolError

from .manifest import blob_name

SEED_BYTES: Final = 16
NUM_BLOCKS: Final = 64
BLOCK_VALUES: Final = 256
SAMPLE_BYTES: Final = 4 * NUM_BLOCKS * BLOCK_VALUES
NUM_WITNESSES: Final = 3
LEAST_WITNESSES: Final = 2
LEAST_BLOCKS: Final = 4
FACTOR: Final = 4.0
FLOOR: Final = 0.5
"""Replicas that are some rounds apart differ by less than this part of their length."""
LOSS_FACTOR: Final = 1.25
LOSS_FLOOR: Final = 0.25
"""Nats per token."""
MEAN_NATS: Final = 0.1
"""Nats per token. Honest replicas are ten times nearer to each other (docs/log.md)."""
ROUNDING_NATS: Final = 0.001
Float32Vector = npt.NDArray[np.float32]
_DOMAIN: Final = b"loco/v1/state-sample\0"


def block_starts(seed: bytes, size: int) -> list[int]:
    """The starts of a sample's blocks, which may overlap. Raises ValueError: none fits."""
    places = size - BLOCK_VALUES + 1
    if places < 1:
        raise ValueError(f"{size} values are no vector to be sampled")
    drawn = blake3.blake3(_DOMAIN + seed).digest(length=8 * NUM_BLOCKS)
    starts: list[int] = (np.frombuffer(drawn, "<u8") % places).tolist()
    return starts


def is_odd(to_witnesses: Sequence[float], among: Sequence[float], length: float) -> bool:
    """Whether a state is unlike those of its witnesses (rule 3).

    All are root mean squares: of its sample less each witness's, of the witnesses' less each
    other's, and of its sample.
    """
    if len(to_witnesses) < LEAST_WITNESSES:
        return False
    return min(to_witnesses) > FACTOR * median_high(among) and min(to_witnesses) > FLOOR * length


def is_worse(loss: float, told: Sequence[float]) -> bool:
    """Whether a state with this loss is worse than those of others (rule 6)."""
    if len(told) < LEAST_WITNESSES:
        return False
    return not math.isfinite(loss) or loss > LOSS_FACTOR * median_high(told) + LOSS_FLOOR


def shares_by_loss(losses: Sequence[float]) -> list[float]:
    """How much each of several states counts in their mean, 1 at the most (rule 8)."""
    told = [loss if math.isfinite(loss) else math.inf for loss in losses]
    best, middle = min(told), median_low(told)
    return [
        math.exp((best - loss) / MEAN_NATS) if loss < math.inf and loss <= middle + MEAN_NATS else 0
        for loss in told
    ]


def sample_of(vector_P: Float32Vector, seed: bytes) -> Float32Vector:
    starts = block_starts(seed, vector_P.size)
    return np.concatenate([vector_P[start : start + BLOCK_VALUES] for start in starts])


def stamp_of(vector_P: Float32Vector) -> str:
    """A name of these weights: who has the same has the same one. A liar may say any."""
    return blob_name(sample_of(vector_P, bytes(SEED_BYTES)).astype("<f4").tobytes())


def sample_from(data: bytes) -> Float32Vector:
    """A sample that was sent. Raises RemoteProtocolError."""
    if len(data) != SAMPLE_BYTES:
        raise RemoteProtocolError(f"a sample of {len(data)} bytes, expected {SAMPLE_BYTES}")
    values: Float32Vector = np.frombuffer(data, "<f4")
    if not np.isfinite(values).all():
        raise RemoteProtocolError("a sample with values that are not finite")
    return values


def blocks_of(sample: Float32Vector, blocks: Sequence[int]) -> Float32Vector:
    values: Float32Vector = sample.reshape(-1, BLOCK_VALUES)[list(blocks)].ravel()
    return values


def is_unlike(sample: Float32Vector, witnesses: Sequence[Float32Vector]) -> bool:
    to_witnesses = [_rms(sample - witness) for witness in witnesses]
    among = [_rms(one - other) for one, other in combinations(witnesses, 2)]
    return is_odd(to_witnesses, among, _rms(sample))


def _rms(values: npt.NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
