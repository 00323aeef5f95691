"""N replicas that train side by side in one process: each has weights, gradient and AdamW state.

Two ways to the same gradients:

    looped      one replica after the other, through the trainer's own step. Fastest on a CPU, where
                one replica's activations stay in the cache.
    stacked     weights as [N, P]; one forward and backward of all (vmap). For a GPU, which a model
                this small leaves idle between two kernels.

Shapes: N replicas, A of them that train in this step, P padded parameters, B sequences of a
replica's step, T tokens of a sequence.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from peer.training.device import Precision, autocast
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import FlatOptimizer, inner_optimizer
from peer.training.step import Stepper
from protocol.run.run_spec import RunSpec

Blocks = npt.NDArray[np.int64]


class Replicas(Protocol):
    """Weights of N replicas, and how they train.

    Attributes:
        models: each replica's vectors.
        optimizers: each replica's inner optimizer.
    """

    models: list[FlatModel]
    optimizers: list[FlatOptimizer]

    @property
    def thetas(self) -> Sequence[torch.Tensor]:
        """Each replica's fp32 [P], its storage."""

    def step(self, blocks_NBT: Blocks, learning_rate: float) -> None:
        """One inner step of all."""


class LoopedReplicas:
    """Replicas that train one after the other.

    Args:
        micro_batch: sequences per forward pass.
    """

    def __init__(
        self,
        spec: RunSpec,
        count: int,
        vocabulary: int,
        device: torch.device,
        precision: Precision,
        micro_batch: int,
    ) -> None:
        module = initial_module(spec, vocabulary)
        self.models = [FlatModel(module, device)]
        for _ in range(count - 1):
            self.models.append(FlatModel(initial_module(spec, vocabulary), device))
        self.thetas = [model.theta_P for model in self.models]
        self.optimizers = [
            inner_optimizer(model, spec.optimizer, precision) for model in self.models
        ]
        self._steppers = [
            Stepper(model, optimizer, precision, micro_batch)
            for model, optimizer in zip(self.models, self.optimizers, strict=True)
        ]

    def step(self, blocks_NBT: Blocks, learning_rate: float) -> None:
        for stepper, blocks_BT in zip(self._steppers, blocks_NBT, strict=True):
            stepper.step(blocks_BT, learning_rate)


class StackedReplicas:
    """Replicas that train all at once."""

    def __init__(
        self,
        spec: RunSpec,
        count: int,
        vocabulary: int,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self._device, self._precision = device, precision
        self._module = _on(device, initial_module(spec, vocabulary))
        model = FlatModel(initial_module(spec, vocabulary), device)
        theta_NP = model.theta_P.repeat(count, 1)
        gradient_NP = torch.zeros_like(theta_NP)
        self.thetas = list(theta_NP)
        self._leaves: dict[str, torch.Tensor] = {}
        self._gradients: list[torch.Tensor] = []
        for entry in model.layout.entries:
            part = slice(entry.offset, entry.offset + entry.size)
            shape = (count, *entry.shape)
            self._leaves[entry.name] = theta_NP[:, part].view(shape).requires_grad_()
            self._gradients.append(gradient_NP[:, part].view(shape))
        self.optimizers = []
        self.models = []
        for theta_P, gradient_P in zip(theta_NP, gradient_NP, strict=True):
            row = FlatModel(initial_module(spec, vocabulary), device)
            row.theta_P, row.gradient_P = theta_P, gradient_P
            self.models.append(row)
            self.optimizers.append(inner_optimizer(row, spec.optimizer, precision))

    def step(
        self, blocks_ABT: Blocks, learning_rate: float, active: Sequence[int] | None = None
    ) -> None:
        """One inner step of the replicas `active`, of all if they are not named."""
        tokens_ABT = torch.from_numpy(blocks_ABT).to(self._device)
        leaves, optimizers = self._leaves, self.optimizers
        if active is not None:
            leaves = {name: leaf[list(active)] for name, leaf in leaves.items()}
            optimizers = [optimizers[i] for i in active]
        # Plain attention: the fused kernels are not made to be stacked.
        with autocast(self._device, self._precision), sdpa_kernel(SDPBackend.MATH):
            losses_A = vmap(self._loss)(leaves, tokens_ABT)
        found = torch.autograd.grad(losses_A.sum(), list(self._leaves.values()))
        for gradient, value in zip(self._gradients, found, strict=True):
            gradient.copy_(value)
        for optimizer in optimizers:
            optimizer.step(learning_rate)

    def _loss(self, parameters: dict[str, torch.Tensor], tokens_BT: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": tokens_BT[:, :-1]}
        logits_BTV = functional_call(self._module, parameters, (), inputs).logits
        return functional.cross_entropy(
            logits_BTV.reshape(-1, logits_BTV.shape[-1]).float(), tokens_BT[:, 1:].reshape(-1)
        )


def _on(device: torch.device, module: nn.Module) -> nn.Module:
    return module.to(device)
