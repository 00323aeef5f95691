"""One replica of a stage, with what the trainer of a peer has: module, vectors, compute, AdamW."""

import torch
from torch import nn
from transformers import LlamaConfig

from peer.training.device import Precision
from peer.training.model import FlatModel
from peer.training.optimizer import inner_optimizer
from peer.training.stages.compute import StageCompute
from peer.training.stages.module import initial_stage
from protocol.run.sections import OptimizerSection


class Stage:
    """See the top of the file.

    Args:
        clip_norm: of this stage's own gradient.
        late, foretold: see `StageArm`.

    Attributes:
        module: the stage's layers, and its ends.
        done: microbatches whose gradients are added up.
        norms: of the mean gradient before clipping, by step.
    """

    def __init__(
        self,
        config: LlamaConfig,
        optimizer: OptimizerSection,
        place: tuple[int, int],
        *,
        seed: int,
        precision: Precision,
        device: torch.device,
        clip_norm: float,
        late: int,
        foretold: bool = False,
    ) -> None:
        stage, stages = place
        self.module = initial_stage(config, seed, stage, stages)
        self.model = FlatModel(self.module, device)
        self.compute = StageCompute(self.module, device, precision)
        section = optimizer.model_copy(update={"clip_norm": clip_norm})
        self._optimizer = inner_optimizer(self.model, section, precision)
        self.done = 0
        self.norms: list[float] = []
        self._newest_P = self.model.theta_P.clone() if late else None
        self._before_P = self.model.theta_P.clone() if late else None
        self._last_update_P = torch.zeros_like(self.model.theta_P) if foretold else None

    def embed(self, microbatch: int, tokens_bT: torch.Tensor, *, layers: bool) -> torch.Tensor:
        """Begin a path, through this stage's layers or past them."""
        if layers:
            return self.compute.embed(microbatch, tokens_bT)
        trunk = self.module.model
        kept, trunk.layers = trunk.layers, nn.ModuleDict()
        try:
            return self.compute.embed(microbatch, tokens_bT)
        finally:
            trunk.layers = kept

    def begin_step(self) -> None:
        """From here on gradients are taken: at the weights before the last update, if late."""
        if self._newest_P is not None and self._before_P is not None:
            self._newest_P.copy_(self.model.theta_P)
            self.model.theta_P.copy_(self._before_P)
            if self._last_update_P is not None:
                # Where these weights are taken, the update before them is the last that is known.
                self.model.theta_P.add_(self._last_update_P)
                torch.sub(self._newest_P, self._before_P, out=self._last_update_P)
            self._before_P.copy_(self._newest_P)

    def end_gradients(self) -> torch.Tensor:
        """All gradients of the step are there. Returns the square of the mean gradient's norm."""
        if self._newest_P is not None:
            self.model.theta_P.copy_(self._newest_P)
        self.model.gradient_P.div_(max(1, self.done))
        return self.model.gradient_P.square().sum()

    def update(self, learning_rate: float, factor: torch.Tensor | None) -> None:
        """Step; a factor has clipped the whole model's gradient before."""
        if factor is not None:
            self.model.gradient_P.mul_(factor)
        self.norms.append(float(self._optimizer.step(learning_rate)))
        self.done = 0
