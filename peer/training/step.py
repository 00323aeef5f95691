"""One inner step: forward and backward over micro-batches, clip, optimizer.

Shapes: B sequences of a step, b sequences of a micro-batch, T tokens of a sequence.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .device import Precision, autocast
from .errors import NonFinite
from .model import FlatModel
from .optimizer import FlatOptimizer


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step was like: scalars on the device, so that nothing waits for it before it must."""

    loss: torch.Tensor
    gradient_norm: torch.Tensor

    def settled(self) -> tuple[float, float]:
        """(loss, gradient norm) as numbers. Raises NonFinite."""
        loss, norm = torch.stack((self.loss, self.gradient_norm)).tolist()
        for value, what in ((loss, "loss"), (norm, "gradient norm")):
            if not np.isfinite(value):
                raise NonFinite(f"{what} is {value}")
        return loss, norm


class Stepper:
    """Steps a model. The gradient is zero between two steps."""

    reads_blocks = True

    def __init__(
        self, model: FlatModel, optimizer: FlatOptimizer, precision: Precision, micro_batch: int
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._precision = precision
        self.micro_batch = micro_batch

    def step(self, blocks_BT: npt.NDArray[np.int64], learning_rate: float) -> StepResult:
        """Train on these blocks, [B, T+1] tokens."""
        loss = torch.zeros((), device=self._model.device)
        for tokens_bT in self._micro_batches(blocks_BT):
            share = tokens_bT.shape[0] / len(blocks_BT)
            with autocast(self._model.device, self._precision):
                part = self._model.loss(tokens_bT) * share
            part.backward()
            loss += part.detach()
        return StepResult(loss, self._optimizer.step(learning_rate))

    def loss_of(self, blocks_BT: npt.NDArray[np.int64]) -> float:
        """Mean loss of these blocks under the current weights, nats per token."""
        total = torch.zeros((), device=self._model.device)
        with torch.no_grad(), autocast(self._model.device, self._precision):
            for tokens_bT in self._micro_batches(blocks_BT):
                total += self._model.loss(tokens_bT) * tokens_bT.shape[0]
        return float(total) / len(blocks_BT)

    def _micro_batches(self, blocks_BT: npt.NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
        tokens_BT = torch.from_numpy(blocks_BT)
        if self._model.device.type == "cuda":
            tokens_BT = tokens_BT.pin_memory().to(self._model.device, non_blocking=True)
        parts: tuple[torch.Tensor, ...] = tokens_BT.split(self.micro_batch)
        return parts
