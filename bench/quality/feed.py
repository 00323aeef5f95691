"""Which blocks each replica trains next: the run's data plan, in shares that follow the speeds."""

from collections.abc import Sequence

import numpy as np

from peer.training.corpus import Corpus
from protocol.schedule.data_plan import DataPlan

from .pairing import peer_names
from .replicas import Blocks


class Feed:
    """Walks the places of all replicas.

    Args:
        batch_size: sequences per step and replica.
        weights: of each replica, as the daemon publishes them (peer/rounds/shares.py).

    Attributes:
        stands: epoch and position of each replica, by its name.
    """

    def __init__(self, corpus: Corpus, seed: int, batch_size: int, weights: Sequence[int]) -> None:
        self._names = peer_names(len(weights))
        self._members = list(zip(self._names, weights, strict=True))
        self._batch_size = batch_size
        self._corpus = corpus
        self._plan = DataPlan(seed, corpus.num_blocks)
        self.stands = dict.fromkeys(self._names, (0, 0))

    def next_blocks(self, active: Sequence[int] | None = None) -> Blocks:
        """[A, B, T + 1] tokens for the replicas `active`; for all, if they are not named."""
        names = self._names if active is None else [self._names[i] for i in active]
        return np.stack([self._next_of(name) for name in names])

    def _next_of(self, name: str) -> Blocks:
        epoch, position = self.stands[name]
        taken = self._plan.take(epoch, position, self._batch_size, name, self._members)
        self.stands[name] = taken.epoch, taken.position
        return self._corpus.blocks(taken.blocks)
