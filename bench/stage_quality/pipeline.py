"""A pipeline of stages in one process: the trainer's own stages, boundaries through its own codec.

As over peers, each stage takes the mean over the microbatches that it has done (steppers.py of the
trainer), clips at 1/sqrt(S) of the run's norm and steps by itself. Nothing is lost on the way, and
a stage's gradients of an iteration all belong to the same weights.

Shapes: B sequences of a step, b of a microbatch, T tokens, D width of the model.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch

from bench.quality.replicas import Blocks
from bench.quality.world import World
from peer.codec import get_codec
from peer.training.model import model_config
from peer.training.stages.channel import BoundaryCoder
from peer.training.stages.steppers import stage_clip_norm
from protocol.run.run_spec import RunSpec

from .arms import StageArm
from .routes import Columns, Route, Routes
from .settings import MICROBATCHES
from .stage import Stage

_CLIP_EPSILON: Final = 1e-6
SCORED_AT_ONCE: Final = 16


class Pipeline:
    """See the top of the file.

    Args:
        batch_size: sequences of each data peer's step.

    Attributes:
        stages: replicas of each stage.
        clip_norm: at which each stage clips its own gradient.
        columns: which replica of a stage a microbatch takes.
        iteration: the present one.
    """

    def __init__(self, world: World, arm: StageArm, batch_size: int) -> None:
        self._arm, self._device = arm, world.device
        spec = _spec_of(world, arm)
        config = model_config(spec, world.vocabulary)
        self._clip_norm = spec.optimizer.clip_norm
        own_norm = math.inf if arm.global_clip else stage_clip_norm(self._clip_norm, arm.stages)
        self.clip_norm = own_norm
        self.stages = [
            [
                Stage(
                    config,
                    spec.optimizer,
                    (stage, arm.stages),
                    seed=spec.seed,
                    precision=world.precision,
                    device=world.device,
                    clip_norm=own_norm,
                    late=arm.late,
                    foretold=arm.foretold,
                )
                for _ in range(arm.columns)
            ]
            for stage in range(arm.stages)
        ]
        self._routes = Routes(arm, spec.seed)
        self.columns = Columns(arm, spec.seed)
        self._microbatches = min(MICROBATCHES, batch_size)
        self._sequences = batch_size // self._microbatches
        shape = (self._sequences, spec.model.context_length, spec.model.hidden_size)
        codec = get_codec(arm.codec)
        self._coder = BoundaryCoder(codec, shape, world.device)
        self._slot = memoryview(bytearray(codec.code_bytes(math.prod(shape))))
        self.iteration = 0

    def step(self, blocks_RBT: Blocks, learning_rate: float) -> float:
        """One iteration: each data peer's blocks. Returns the mean loss, nats per token."""
        everyone = [stage for replicas in self.stages for stage in replicas]
        for stage in everyone:
            stage.begin_step()
        losses = [
            loss
            for origin, blocks_BT in enumerate(blocks_RBT)
            for loss in self._of_data_peer(origin, torch.from_numpy(blocks_BT).to(self._device))
        ]
        squares = [stage.end_gradients() for stage in everyone]
        factor = self._global_factor(squares) if self._arm.global_clip else None
        for stage in everyone:
            stage.update(learning_rate, factor)
        self.iteration += 1
        return math.fsum(losses) / len(losses)

    def _of_data_peer(self, origin: int, tokens_BT: torch.Tensor) -> list[float]:
        routes = self._routes.of_iteration(self.iteration, self._microbatches)
        parts = tokens_BT.split(self._sequences)
        return [
            self._microbatch(origin, number, tokens_bT, route)
            for number, (tokens_bT, route) in enumerate(zip(parts, routes, strict=True))
        ]

    def _microbatch(self, origin: int, number: int, tokens_bT: torch.Tensor, route: Route) -> float:
        home = self.stages[0][origin]
        relays = [
            self.stages[stage][self.columns.replica(self.iteration, number, stage, origin)]
            for stage in route
            if stage
        ]
        boundary_bTD = home.embed(number, tokens_bT, layers=0 in route)
        for relay in relays:
            boundary_bTD = relay.compute.forward(number, self.carried(boundary_bTD))
        boundary_bTD = self.carried(boundary_bTD)
        self.at_loss(origin, number, relays, boundary_bTD)
        loss, boundary_bTD = home.compute.finish(number, boundary_bTD)
        for relay in reversed(relays):
            back_bTD = relay.compute.backward(number, self.carried(boundary_bTD))
            relay.compute.add_weights()
            assert back_bTD is not None, "a relay is given activations"
            boundary_bTD = back_bTD
            relay.done += 1
        home.compute.backward(number, self.carried(boundary_bTD))
        home.compute.add_weights()
        home.done += 1
        return loss

    def at_loss(
        self, origin: int, number: int, relays: Sequence[Stage], boundary_bTD: torch.Tensor
    ) -> None:
        """A microbatch of a data peer has come to the loss."""

    def carried(self, boundary_bTD: torch.Tensor) -> torch.Tensor:
        """The boundary as the next machine reads it."""
        self._coder.write(boundary_bTD, self._slot)
        return self._coder.read(self._slot)

    def _global_factor(self, squares: Sequence[torch.Tensor]) -> torch.Tensor:
        norm = torch.stack(list(squares)).sum().sqrt()
        return (self._clip_norm / (norm + _CLIP_EPSILON)).clamp_(max=1.0)

    def loss_of(self, blocks_BT: Blocks, relays: Sequence[int], column: int = 0) -> float:
        """Loss of [B, T+1] tokens over these relay stages, nats per token; nothing is coded."""
        home = self.stages[0][column].compute
        total = 0.0
        for tokens_bT in torch.from_numpy(blocks_BT).to(self._device).split(SCORED_AT_ONCE):
            hidden_bTD = home.score_embed(tokens_bT)
            for stage in relays:
                hidden_bTD = self.stages[stage][column].compute.score_through(hidden_bTD)
            total += home.score_loss(hidden_bTD, tokens_bT) * len(tokens_bT)
        return total / len(blocks_BT)

    @property
    def parameters(self) -> int:
        """The number of one whole model."""
        return sum(replicas[0].model.layout.parameters for replicas in self.stages)


def _spec_of(world: World, arm: StageArm) -> RunSpec:
    model = world.spec.model.model_copy(update={"num_layers": arm.stages})
    optimizer = world.spec.optimizer
    if arm.beta1 is not None:
        optimizer = optimizer.model_copy(update={"betas": (arm.beta1, optimizer.betas[1])})
    return world.spec.model_copy(update={"model": model, "optimizer": optimizer})
