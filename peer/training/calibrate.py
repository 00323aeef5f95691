"""Before the first round: how many sequences fit at once, and how fast the trainer is alone.

Runs before the first `Load`, which sets the weights and forgets the optimizer's moments; so nothing
of it is left in what is trained. The blocks used are held-out ones, which are here before any piece
of the corpus.
"""

import statistics
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import psutil
import torch

from .device import CPU_MEMORY_SHARE, is_out_of_memory
from .model import FlatModel
from .optimizer import FlatOptimizer
from .step import Stepper

WARM_UP_STEPS: Final = 2
MEASURED_STEPS: Final = 10
MEASURED_S: Final = 1.0
"""Measuring ends after so many steps, or so long, whichever is first."""
_LEARNING_RATE: Final = 1e-6


def largest_power_of_two(batch_size: int) -> int:
    """The largest power of two that divides `batch_size`."""
    return batch_size & -batch_size


def starting_micro_batch(setting: int | str, batch_size: int, cap: int) -> int:
    """Where the search starts: the setting; for `auto` a power of two that divides the batch."""
    size = largest_power_of_two(batch_size) if isinstance(setting, str) else setting
    return max(1, min(size, batch_size, cap or batch_size))


def cpu_micro_batch(start: int, sequence_bytes: int) -> int:
    """`start`, halved until its activations are a fair share of the free memory."""
    budget_bytes = psutil.virtual_memory().available * CPU_MEMORY_SHARE
    while start > 1 and start * sequence_bytes > budget_bytes:
        start //= 2
    return start


def fit_micro_batch(stepper: Stepper, blocks_BT: npt.NDArray[np.int64]) -> None:
    """Halve the micro-batch of `stepper` until one whole step runs.

    Raises:
        torch.OutOfMemoryError: not even one sequence fits.
    """
    while True:
        try:
            float(stepper.step(blocks_BT, _LEARNING_RATE).loss)
            return
        except RuntimeError as error:
            if not is_out_of_memory(error) or stepper.micro_batch == 1:
                raise
        stepper.micro_batch //= 2
        torch.cuda.empty_cache()


def measure_steps_per_s(stepper: Stepper, blocks: Callable[[], npt.NDArray[np.int64]]) -> float:
    """Inner steps per second of the trainer alone: the median of a few."""
    for _ in range(WARM_UP_STEPS):
        float(stepper.step(blocks(), _LEARNING_RATE).loss)
    durations_s: list[float] = []
    while len(durations_s) < MEASURED_STEPS and sum(durations_s) < MEASURED_S:
        started_s = time.perf_counter()
        float(stepper.step(blocks(), _LEARNING_RATE).loss)
        durations_s.append(time.perf_counter() - started_s)
    return 1 / max(1e-9, statistics.median(durations_s))


def forget(model: FlatModel, optimizer: FlatOptimizer) -> None:
    """Leave nothing behind but the speed: zero weights and gradient until `Load`."""
    model.theta_P.zero_()
    model.gradient_P.zero_()
    optimizer.reset()
