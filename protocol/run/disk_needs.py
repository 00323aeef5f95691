"""Room that a peer takes on its disk, as far as it is known before it trains.

    checkpoints   those that are kept, and one that is being written beside them
    states        of the outer state, one file for each state that joiners read
    corpus        what is not here yet

All of it is the most that can be: what an optimizer does not have is not written.
"""

from dataclasses import dataclass
from typing import Final

CHECKPOINT_BYTES_PER_PARAMETER: Final = 20
"""The most that one takes: slow and fast weights, outer momentum and two moments, fp32."""
SPARE_BYTES: Final = 64 << 20
"""What a disk must have beside a checkpoint: others write there too."""
STATE_BYTES_PER_PARAMETER: Final = 8
"""Slow weights and outer momentum, fp32."""
KEPT_STATES: Final = 2
"""State files kept for joiners."""


@dataclass(frozen=True, slots=True)
class DiskNeeds:
    """Room for one peer, in bytes.

    Attributes:
        checkpoint_bytes: of one checkpoint.
        checkpoints_bytes: of all that lie there at once.
        states_bytes: of states that joiners read.
        corpus_bytes: of the corpus, as far as it is not here yet.
    """

    checkpoint_bytes: int
    checkpoints_bytes: int
    states_bytes: int
    corpus_bytes: int

    @property
    def least_bytes(self) -> int:
        """Without so much no checkpoint can be written at all."""
        return self.checkpoint_bytes + self.corpus_bytes + SPARE_BYTES

    @property
    def total_bytes(self) -> int:
        """All of it."""
        parts = (self.checkpoints_bytes, self.states_bytes, self.corpus_bytes)
        return max(self.least_bytes, sum(parts) + SPARE_BYTES)


def checkpoint_bytes(parameters: int) -> int:
    """The most that one checkpoint of so many parameters takes."""
    return CHECKPOINT_BYTES_PER_PARAMETER * parameters


def disk_needs(
    parameters: int,
    checkpoint_keep: int,
    *,
    checkpoint_max_bytes: float | None = None,
    corpus_bytes: int = 0,
) -> DiskNeeds:
    """What a peer with so many (padded) parameters takes.

    Args:
        checkpoint_keep: checkpoints that are kept.
        checkpoint_max_bytes: of all kept ones together; the newest stays in any case.
        corpus_bytes: that are still to come.
    """
    each = checkpoint_bytes(parameters)
    kept = each * checkpoint_keep
    if checkpoint_max_bytes is not None:
        kept = max(each, min(kept, int(checkpoint_max_bytes)))
    states = KEPT_STATES * STATE_BYTES_PER_PARAMETER * parameters
    return DiskNeeds(each, kept + each, states, corpus_bytes)
