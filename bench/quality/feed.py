"""Which blocks each replica trains next: the run's data plan, in equal shares."""

import numpy as np

from peer.rounds.shares import MEMBER_WEIGHT
from peer.training.corpus.blocks import Corpus
from protocol.schedule.data_plan import DataPlan

from .pairing import peer_names
from .replicas import Blocks


class Feed:
    """Walks the places of all replicas.

    Args:
        batch_size: sequences per step and replica.

    Attributes:
        stands: epoch and position of each replica, by its name.
    """

    def __init__(self, corpus: Corpus, seed: int, batch_size: int, replicas: int) -> None:
        self._names = peer_names(replicas)
        self._members = [(name, MEMBER_WEIGHT) for name in self._names]
        self._batch_size = batch_size
        self._corpus = corpus
        self._plan = DataPlan(seed, corpus.num_blocks)
        self.stands = dict.fromkeys(self._names, (0, 0))

    def next_blocks(self) -> Blocks:
        """[N, B, T + 1] tokens for all replicas."""
        return np.stack([self._next_of(name) for name in self._names])

    def _next_of(self, name: str) -> Blocks:
        epoch, position = self.stands[name]
        taken = self._plan.take(epoch, position, self._batch_size, name, self._members)
        self.stands[name] = taken.epoch, taken.position
        return self._corpus.blocks(taken.blocks)
