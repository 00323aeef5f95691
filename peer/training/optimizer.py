"""AdamW on the flat vector, and the clipping of its gradient."""

from collections.abc import Callable
from typing import Final

import torch

from protocol.run.run_spec import OptimizerSection

from .model import FlatModel

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""The names that torch gives them."""
_CLIP_EPSILON = 1e-6
"""Keeps the clip factor finite for a zero gradient."""


class FlatAdamW:
    """AdamW over a FlatModel: weight decay on matrices alone, one clipping norm for all."""

    def __init__(self, model: FlatModel, section: OptimizerSection) -> None:
        self._model = model
        self._clip_norm = section.clip_norm
        self._adamw = torch.optim.AdamW(
            [
                {
                    "params": group.parameters,
                    "weight_decay": section.weight_decay if group.decays else 0.0,
                }
                for group in model.groups()
            ],
            lr=section.learning_rate,
            betas=section.betas,
            fused=True,
        )

    def __repr__(self) -> str:
        return f"<FlatAdamW over {self._model!r}>"

    def reset(self) -> None:
        """Forget the moments: the weights were replaced."""
        self._adamw.state.clear()

    def moments(self) -> dict[str, torch.Tensor]:
        """The moments by name, as views, fp32; none before the first step."""
        found = {}
        for index, parameter in enumerate(self._parameters()):
            for name in MOMENTS:
                if (moment := self._adamw.state[parameter].get(name)) is not None:
                    found[f"{name}.{index}"] = moment
        return found

    @property
    def num_steps(self) -> int:
        """Steps that the moments have seen."""
        steps = [self._adamw.state[parameter].get("step") for parameter in self._parameters()]
        return 0 if steps[0] is None else int(steps[0])

    def take_over(self, num_steps: int, fill: Callable[[str, torch.Tensor], None]) -> None:
        """Go on from moments that were kept.

        Args:
            num_steps: that they have seen.
            fill: writes the moment of this name into a vector.
        """
        for index, parameter in enumerate(self._parameters()):
            state = self._adamw.state[parameter]
            state["step"] = torch.tensor(float(num_steps), device=parameter.device)
            for name in MOMENTS:
                state[name] = torch.empty_like(parameter, memory_format=torch.preserve_format)
                fill(f"{name}.{index}", state[name])

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [each for group in self._adamw.param_groups for each in group["params"]]

    def step(self, learning_rate: float) -> torch.Tensor:
        """Clip, step, and zero the gradient. Returns its norm before clipping (a scalar)."""
        gradient_P = self._model.gradient_P
        norm: torch.Tensor = torch.linalg.vector_norm(gradient_P)
        gradient_P.mul_((self._clip_norm / (norm + _CLIP_EPSILON)).clamp_(max=1.0))
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        gradient_P.zero_()
        return norm
