"""AdamW on the flat vector, and the clipping of its gradient."""

import torch

from protocol.run.run_spec import OptimizerSection

from .model import FlatModel

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
