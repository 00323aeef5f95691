"""The inner optimizer on the flat vector: AdamW, or Muon and AdamW; and the clipping of a gradient.

Theory. AdamW scales each weight's step by what that weight's gradients were like. Muon looks at a
matrix as a whole: its step is the momentum with all singular values made about 1, by five
Newton-Schulz iterations (torch.optim.Muon; https://kellerjordan.github.io/posts/muon), in the
precision that the forward pass computes in: bf16 is fast just where it is chosen for that. It says
something of matrices between layers alone, so the matrices of the blocks are Muon's, and
embeddings, head and norms are AdamW's.

Both work on views of the one vector, so nothing is copied, and clip by one norm for all. A step is
given one learning rate, AdamW's; Muon's stands in the same ratio to it throughout the run, so that
schedule, warm-up and amendments move both.

torch.optim.Muon always iterates in bf16. Many CPUs have no such arithmetic and work it out by hand,
which made a step of the demo's model ten times as long. In fp32 the same five iterations are more
exact and 17 times as fast there (docs/results/optimizers.md). Everything else, state included, is
torch's: a checkpoint of one goes on in the other.

How large Muon's step is, is the run spec's `adjust_lr`, by its names in torch: `original` makes it
the rate times sqrt(max(1, rows / columns)), `match_rms_adamw` as long as AdamW's usual step, 0.2
per weight in the mean square (arXiv 2502.16982): then AdamW's rate and weight decay fit.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from protocol.run.sections import MuonSection, OptimizerSection

from .device import Precision
from .model import FlatModel

ADAMW_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
MUON_MOMENTS: Final = ("momentum_buffer",)
"""The names that torch gives them."""
_CLIP_EPSILON = 1e-6
"""Keeps the clip factor finite for a zero gradient."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of torch's optimizers, over some of the weights.

    Attributes:
        moments: the names of what it remembers of a parameter.
        rate_ratio: its learning rate, in AdamW's.
        counts: whether it counts its steps.
    """

    torch_optimizer: torch.optim.Optimizer
    moments: tuple[str, ...]
    rate_ratio: float = 1.0
    counts: bool = False

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Its parameters, in order."""
        return [each for group in self.torch_optimizer.param_groups for each in group["params"]]


class FlatOptimizer:
    """An inner optimizer over a FlatModel, of parts that share one clipping norm."""

    def __init__(self, model: FlatModel, section: OptimizerSection, parts: list[Part]) -> None:
        self._model = model
        self._clip_norm = section.clip_norm
        self._parts = parts
        self._num_steps = 0

    def __repr__(self) -> str:
        names = ", ".join(type(part.torch_optimizer).__name__ for part in self._parts)
        return f"<FlatOptimizer {names} over {self._model!r}>"

    def reset(self) -> None:
        """Forget the moments: the weights were replaced."""
        for part in self._parts:
            part.torch_optimizer.state.clear()
        self._num_steps = 0

    def moments(self) -> dict[str, torch.Tensor]:
        """The moments by name, as flat views, fp32; none before the first step."""
        found = {}
        for part, index, parameter in self._parameters():
            for name in part.moments:
                if (moment := part.torch_optimizer.state[parameter].get(name)) is not None:
                    found[f"{name}.{index}"] = moment.view(-1)
        return found

    @property
    def clip_norm(self) -> float:
        """The norm at which a step's gradient is clipped."""
        return self._clip_norm

    @property
    def num_steps(self) -> int:
        """Steps that the moments have seen."""
        return self._num_steps

    def take_over(self, num_steps: int, fill: Callable[[str, torch.Tensor], None]) -> None:
        """Go on from moments that were kept.

        Args:
            num_steps: that they have seen.
            fill: writes the moment of this name into a vector.
        """
        for part, index, parameter in self._parameters():
            state = part.torch_optimizer.state[parameter]
            if part.counts:
                state["step"] = torch.tensor(float(num_steps), device=parameter.device)
            for name in part.moments:
                state[name] = torch.empty_like(parameter, memory_format=torch.contiguous_format)
                fill(f"{name}.{index}", state[name].view(-1))
        self._num_steps = num_steps

    def _parameters(self) -> Iterator[tuple[Part, int, torch.nn.Parameter]]:
        """Each parameter with its part and its number in it."""
        for part in self._parts:
            for index, parameter in enumerate(part.parameters):
                yield part, index, parameter

    def step(self, learning_rate: float) -> torch.Tensor:
        """Clip, step, and zero the gradient. Returns its norm before clipping (a scalar)."""
        gradient_P = self._model.gradient_P
        norm: torch.Tensor = torch.linalg.vector_norm(gradient_P)
        gradient_P.mul_((self._clip_norm / (norm + _CLIP_EPSILON)).clamp_(max=1.0))
        for part in self._parts:
            for group in part.torch_optimizer.param_groups:
                group["lr"] = learning_rate * part.rate_ratio
            part.torch_optimizer.step()
        self._num_steps += 1
        gradient_P.zero_()
        return norm


def flat_adamw(model: FlatModel, section: OptimizerSection) -> FlatOptimizer:
    """AdamW over a FlatModel: weight decay on matrices alone."""
    return FlatOptimizer(model, section, [_adamw(model, section)])


def flat_muon(model: FlatModel, section: OptimizerSection, iteration: Precision) -> FlatOptimizer:
    """Muon over the matrices of a FlatModel's blocks, AdamW over the rest.

    Args:
        iteration: precision of Muon's.
    """
    muon = section.muon or MuonSection()
    adamw = _adamw(model, section, without_block_matrices=True)
    return FlatOptimizer(model, section, [adamw, _muon(model, section, muon, iteration)])


def inner_optimizer(
    model: FlatModel, section: OptimizerSection, precision: Precision
) -> FlatOptimizer:
    """The optimizer that the run spec names, for a model that computes in this precision."""
    if section.name == "muon":
        return flat_muon(model, section, precision)
    return flat_adamw(model, section)


def _adamw(
    model: FlatModel, section: OptimizerSection, *, without_block_matrices: bool = False
) -> Part:
    adamw = torch.optim.AdamW(
        [
            {
                "params": group.parameters,
                "weight_decay": section.weight_decay if group.decays else 0.0,
            }
            for group in model.groups(without_block_matrices=without_block_matrices)
        ],
        lr=section.learning_rate,
        betas=section.betas,
        fused=True,
    )
    return Part(adamw, ADAMW_MOMENTS, counts=True)


def _muon(
    model: FlatModel, section: OptimizerSection, muon: MuonSection, iteration: Precision
) -> Part:
    peak = section.learning_rate if muon.learning_rate is None else muon.learning_rate
    kind = Fp32Muon if iteration == "fp32" else torch.optim.Muon
    made = kind(
        model.block_matrices(),
        lr=peak,
        weight_decay=section.weight_decay,
        momentum=muon.momentum,
        adjust_lr_fn=muon.adjust_lr,
    )
    return Part(made, MUON_MOMENTS, rate_ratio=peak / section.learning_rate)


# --- Muon whose iteration is in fp32 --------------------------------------------------------------


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
