"""Muon where the forward pass is in fp32: torch's, with its iteration in fp32 as well.

torch.optim.Muon always iterates in bf16. Many CPUs have no such arithmetic and work it out by hand,
which made a step of the demo's model ten times as long. In fp32 the same five iterations are more
exact and 17 times as fast there (docs/results/optimizers.md). Everything else, state included, is
torch's: a checkpoint of one goes on in the other.
"""

import math
from collections.abc import Callable
from typing import Any

import torch


class Fp32Muon(torch.optim.Muon):
    """torch.optim.Muon with Nesterov's momentum, whose iteration is in fp32."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step. There is no closure."""
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            for parameter in group["params"]:
                self._step(parameter, group)

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None, "the gradient is a view that stays"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum_buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        looked_ahead = gradient.lerp(momentum_buffer, group["momentum"])
        update = orthogonalised(
            looked_ahead, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        rate = group["lr"]
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.add_(update, alpha=-rate * scale(parameter.shape, group["adjust_lr_fn"]))


def orthogonalised(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], iterations: int, eps: float
) -> torch.Tensor:
    """The matrix with all singular values made about 1, in its own precision."""
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    short = matrix.T if tall else matrix
    short = short / short.norm().clamp(min=eps)
    for _ in range(iterations):
        gram = short @ short.T
        short = torch.addmm(short, torch.addmm(gram, gram, gram, beta=b, alpha=c), short, beta=a)
    return short.T if tall else short


def scale(shape: torch.Size, adjust_lr: str) -> float:
    """The factor of the rate, by its name in torch."""
    rows, columns = shape
    if adjust_lr == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
