"""One inner step: forward and backward over micro-batches, clip, optimizer.

Before the first round some steps on held-out blocks, which are here before any piece of the corpus,
find out how many sequences fit at once, and how fast the trainer is alone. `Load` sets the weights
afterwards, and forgets the moments.

Shapes: B sequences of a step, b sequences of a micro-batch, T tokens of a sequence.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from .device import Precision, activation_memory, autocast, is_out_of_memory
from .model import FlatModel
from .optimizer import FlatOptimizer
from .ports import NonFinite
from .ranks.group import ALONE, RankOrder, Ranks


@dataclass(frozen=True, slots=True)
class StepResult:
    """Scalars on the device, so that nothing waits for the step before it must."""

    loss: torch.Tensor
    gradient_norm: torch.Tensor

    def settled(self) -> tuple[float, float]:
        """(loss, gradient norm) as numbers. Raises NonFinite."""
        loss, norm = torch.stack((self.loss, self.gradient_norm)).tolist()
        for value, what in ((loss, "loss"), (norm, "gradient norm")):
            if not np.isfinite(value):
                raise NonFinite(f"{what} is {value}")
        return loss, norm


@dataclass(eq=False)
class Stepper:
    """Steps a model, with the other ranks if there are any. The gradient is zero between steps."""

    reads_blocks = True
    _model: FlatModel
    optimizer: FlatOptimizer
    _precision: Precision
    micro_batch: int
    ranks: Ranks = ALONE

    @property
    def measures_together(self) -> bool:
        """Whether all ranks compute a loss: one that fails leaves the others waiting."""
        return bool(self._model.spans) or self.ranks.divide_sequences

    @property
    def fewest(self) -> int:
        """Sequences at once of which fewer are not tried before layers are computed again."""
        on_gpu = self._model.device.type == "cuda"
        return LEAST_ON_GPU if on_gpu and not self._model.recomputes else 1

    def step(self, blocks_BT: npt.NDArray[np.int64], learning_rate: float) -> StepResult:
        """Train on [B, T+1] tokens, of which each rank takes a share. Others get rank 0's."""
        loss = torch.zeros((), device=self._model.device)
        own_BT = blocks_BT
        if self.ranks.count > 1:
            self._tell(RankOrder.STEP, blocks_BT, learning_rate)
            own_BT = self.ranks.share_of(blocks_BT)
        all_targets = num_targets(blocks_BT)
        passes = self._micro_batches(own_BT)
        if self._model.spans:
            passes = chain(passes, self._waiting(blocks_BT))
        for tokens_bT, targets in passes:
            share = targets / all_targets
            with autocast(self._model.device, self._precision):
                part = self._model.loss(tokens_bT) * share
            part.backward()
            loss += part.detach()
        if self.ranks.count > 1:
            self.ranks.sum(loss)
        return StepResult(loss, self.optimizer.step(learning_rate))

    def _tell(self, order: RankOrder, blocks_BT: npt.NDArray[np.int64], *more: float) -> None:
        """Have all ranks do this now, from the same weights; the blocks of others are filled."""
        ranks, model = self.ranks, self._model
        ranks.tell(order, *blocks_BT.shape, model.moved, *more)
        model.take_moved(ranks)
        ranks.spread(torch.from_numpy(blocks_BT))

    def _waiting(self, blocks_BT: npt.NDArray[np.int64]) -> Iterator[tuple[torch.Tensor, int]]:
        """Passes for nothing, while others, who need our weights, have more to do."""
        shares = np.array_split(blocks_BT, self.ranks.count)
        passes = [sum(num_targets(part) > 0 for part in self._parts(each)) for each in shares]
        any_bT = torch.zeros((1, blocks_BT.shape[1]), dtype=torch.int64)
        for _ in range(max(passes) - passes[self.ranks.rank]):
            yield any_bT.to(self._model.device), 0

    def goes_on_after(self, error: Exception, most: int) -> bool:
        """Take other ways after a step that failed; False where none is left.

        Args:
            most: sequences at once, to begin with.
        """
        if not is_out_of_memory(error):
            return self._model.forgo_compiling(error)
        if self.micro_batch > self.fewest:
            self.micro_batch = max(self.fewest, self.micro_batch // 2)
            return True
        self.micro_batch = most
        return self._model.recompute()

    def agree(self) -> None:
        """Do what fits all ranks."""
        self.micro_batch = self.ranks.least(self.micro_batch)
        if not self.ranks.least(not self._model.recomputes):
            self._model.recompute()

    def loss_of(self, blocks_BT: npt.NDArray[np.int64]) -> float:
        """Mean loss of these blocks' targets under the current weights, nats per token."""
        total = torch.zeros((), device=self._model.device)
        if self.measures_together:
            self._tell(RankOrder.LOSS, blocks_BT)
        with torch.no_grad(), autocast(self._model.device, self._precision):
            for tokens_bT, targets in self._micro_batches(blocks_BT):
                total += self._model.loss(tokens_bT) * targets
        if self.ranks.divide_sequences:
            self.ranks.sum(total)
        return float(total) / max(1, num_targets(blocks_BT))

    def log_probs_of(self, tokens_BT: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Log-probabilities of the targets under the current weights, [B, T]; 0 of others."""
        if self.measures_together:
            self._tell(RankOrder.LOG_PROBS, tokens_BT)
        with torch.no_grad(), autocast(self._model.device, self._precision):
            parts = [self._model.log_probs(each).cpu() for each in self._split(tokens_BT)]
        told_BT: npt.NDArray[np.float32] = torch.cat(parts).numpy()
        return told_BT

    def _micro_batches(
        self, blocks_BT: npt.NDArray[np.int64]
    ) -> Iterator[tuple[torch.Tensor, int]]:
        """The micro-batches with targets, and how many those have."""
        for part_BT, tokens_bT in zip(self._parts(blocks_BT), self._split(blocks_BT), strict=True):
            if targets := num_targets(part_BT):
                yield tokens_bT, targets

    def _parts(self, blocks_BT: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        return np.split(blocks_BT, range(self.micro_batch, len(blocks_BT), self.micro_batch))

    def _split(self, blocks_BT: npt.NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
        tokens_BT = torch.from_numpy(blocks_BT)
        if self._model.device.type == "cuda":
            tokens_BT = tokens_BT.pin_memory().to(self._model.device, non_blocking=True)
        parts: tuple[torch.Tensor, ...] = tokens_BT.split(self.micro_batch)
        return parts


def num_targets(blocks_BT: npt.NDArray[np.int64]) -> int:
    """Tokens that are predicted: all that follow one, except those that are given."""
    return int((blocks_BT[:, 1:] >= 0).sum())


LEAST_ON_GPU: Final = 2
"""Sequences at once below which a GPU is faster with layers computed again, and more at once.

An H100 trained `1b` with 1, 4 and 8 at once in 89, 58 and 56 ms for a sequence without the
optimizer, and with 8 whose layers it computes again in 68. Between 1 and 4 that makes 69 with 2,
when some 4 fit with layers computed again, which take 71. On a CPU one at a time costs nothing.
"""


MEASURED_STEPS: Final = 5
"""The median of this many is taken: the first one or two, which warm up, are above it."""


def largest_power_of_two(batch_size: int) -> int:
    return batch_size & -batch_size


def starting_micro_batch(setting: int | str, batch_size: int, cap: int) -> int:
    """Where the search starts: the setting; for `auto` a power of two that divides the batch."""
    size = largest_power_of_two(batch_size) if isinstance(setting, str) else setting
    return max(1, min(size, batch_size, cap or batch_size))


def cpu_micro_batch(start: int, needed: Callable[[int], int]) -> int:
    """`start`, halved until it fits by the memory needed; 0 where not even one sequence does."""
    budget_bytes = activation_memory(torch.device("cpu"))
    while start and needed(start) > budget_bytes:
        start //= 2
    return start


def fit_micro_batch(stepper: Stepper, blocks_BT: npt.NDArray[np.int64]) -> None:
    """Halve the micro-batch until whole steps run; then compute layers again.

    Raises torch's error if nothing helps.

    The first step makes the optimizer's moments; the second must fit beside them. Each rank tries
    its own share for itself; what fits all of them is taken: ranks that divide sequences speak in
    each layer, so all must go through them as often.
    """
    with stepper.ranks.apart():
        _fit(stepper, blocks_BT)
    stepper.agree()


def _fit(stepper: Stepper, blocks_BT: npt.NDArray[np.int64]) -> None:
    most = stepper.micro_batch
    while True:
        try:
            for _ in range(2):
                _seconds_of_step(stepper, blocks_BT)
            return
        except Exception as error:
            if not stepper.goes_on_after(error, most):
                raise
        torch.cuda.empty_cache()


def measure_steps_per_s(stepper: Stepper, blocks_BT: npt.NDArray[np.int64]) -> float:
    """Inner steps per second of the trainer alone."""
    durations_s = [_seconds_of_step(stepper, blocks_BT) for _ in range(MEASURED_STEPS)]
    return 1 / max(1e-9, statistics.median(durations_s))


def _seconds_of_step(stepper: Stepper, blocks_BT: npt.NDArray[np.int64]) -> float:
    started_s = time.perf_counter()
    float(stepper.step(blocks_BT, 0.0).loss)  # which waits until it is done
    return time.perf_counter() - started_s
