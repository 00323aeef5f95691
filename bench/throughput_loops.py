"""The two loops that bench/throughput.py compares: the trainer's inner step, and a plain one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from peer.training.device import Precision, autocast, is_out_of_memory
from peer.training.model import FlatModel
from peer.training.optimizer import inner_optimizer
from peer.training.step import Stepper, StepResult
from protocol.run.run_spec import RunSpec

Blocks = npt.NDArray[np.int64]
"""[B, T+1] tokens of one step."""


@dataclass(frozen=True, slots=True)
class Way:
    """How both loops compute."""

    device: torch.device
    precision: Precision
    compile: bool = False


class Loop(Protocol):
    """Attributes: micro_batch, the sequences at once."""

    micro_batch: int

    def run(self, steps: Sequence[Blocks]) -> float:
        """Train a step on each of these blocks, and wait until the device has done them. The last
        one's loss.
        """


class OurLoop:
    """The trainer's: FlatModel, optimizer and Stepper; a step's numbers are read one step later."""

    def __init__(self, module: nn.Module, spec: RunSpec, way: Way, micro_batch: int) -> None:
        model = FlatModel(module, way.device, compile=way.compile)
        self._model = model
        self._optimizer = inner_optimizer(model, spec.optimizer, way.precision)
        self._stepper = Stepper(model, self._optimizer, way.precision, micro_batch)
        self._rate = spec.optimizer.learning_rate

    @property
    def micro_batch(self) -> int:
        return self._stepper.micro_batch

    @micro_batch.setter
    def micro_batch(self, sequences: int) -> None:
        self._stepper.micro_batch = sequences
        self._model.gradient_P.zero_()  # a step that failed has left some of its gradient

    def run(self, steps: Sequence[Blocks]) -> float:
        launched: StepResult | None = None
        for blocks_BT in steps:
            result = self._stepper.step(blocks_BT, self._rate)
            if launched is not None:
                launched.settled()
            launched = result
        assert launched is not None
        return launched.settled()[0]

    def run_optimizer(self, steps: int) -> None:
        """Clip and step so many times, without a gradient, and wait until the device has done it:
        how long it takes does not depend on the values.
        """
        for _ in range(steps):
            norm = self._optimizer.step(self._rate)
        float(norm)


class PlainLoop:
    """The plain loop: the module, torch's fused AdamW, torch's clipping; nothing is read
    before the last step.
    """

    def __init__(self, module: nn.Module, spec: RunSpec, way: Way, micro_batch: int) -> None:
        section = spec.optimizer
        self._module = module.to(way.device)
        self._forward = torch.compile(module) if way.compile else module
        self._clip_norm = section.clip_norm
        self._way = way
        self._optimizer = torch.optim.AdamW(
            module.parameters(),
            lr=section.learning_rate,
            betas=section.betas,
            weight_decay=section.weight_decay,
            fused=True,
        )
        self.micro_batch = micro_batch

    def run(self, steps: Sequence[Blocks]) -> float:
        losses = [self._step(blocks_BT) for blocks_BT in steps]
        return float(losses[-1])

    def _step(self, blocks_BT: Blocks) -> torch.Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        tokens_BT = torch.from_numpy(blocks_BT).to(self._way.device)
        total = torch.zeros((), device=self._way.device)
        for tokens_bT in tokens_BT.split(self.micro_batch):
            with autocast(self._way.device, self._way.precision):
                logits = self._forward(input_ids=tokens_bT[:, :-1]).logits
                mean = functional.cross_entropy(
                    logits.flatten(0, 1).float(), tokens_bT[:, 1:].flatten()
                )
                loss = mean * tokens_bT.shape[0] / tokens_BT.shape[0]
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._clip_norm)
        self._optimizer.step()
        return total


def fit_together(loops: Sequence[Loop], blocks_BT: Blocks) -> None:
    """Halve the micro-batch of all of them until each can do a step beside the others.

    Raises:
        torch.OutOfMemoryError: not even one sequence fits.
    """
    while not _all_fit(loops, blocks_BT):
        for loop in loops:
            loop.micro_batch //= 2
        torch.cuda.empty_cache()


def _all_fit(loops: Sequence[Loop], blocks_BT: Blocks) -> bool:
    try:
        for loop in loops:
            loop.run([blocks_BT])
    except RuntimeError as error:
        if not is_out_of_memory(error) or loops[0].micro_batch == 1:
            raise
        return False
    return True


def matmul(way: Way, size: int, times: int) -> Callable[[], None]:
    """Multiply two square matrices so many times, in the precision of the loops, and wait."""
    dtype = torch.bfloat16 if way.precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=way.device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)

    def run() -> None:
        for _ in range(times):
            torch.matmul(a, b, out=product)
        float(product[0, 0])  # waits for the device

    return run
