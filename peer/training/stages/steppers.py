"""One inner step of a stage: an iteration's microbatches, then clip and optimizer.

Theory. A data peer's step is its batch, cut into microbatches: each goes through the first layers
here, through other peers' stages, comes back for head and loss, and its gradient walks the same way
back. A relay's step is all that the daemon lets through between two `Finish`. Every stage takes the
mean over the microbatches that it has done, so its gradient is a part of the whole model's,
whatever was lost on the way.

Clipping. No stage knows the norm of the whole gradient. Each of S stages clips at 1/sqrt(S) of the
run's norm: stages whose gradients are equally long then clip as the whole model would (Pluralis'
Agora does so). The share of one microbatch is bounded before (`GradientSum`), so that a neighbour's
huge gradient does not clip the others' to nothing.

Losses. A microbatch that does not come back counts only in the head, which saw it before it left
for the last time. One that comes again, because others lost it, counts once: the daemon says so at
a relay, and the head knows what it has seen.

A backward adds to the model's flat gradient, which is measured after each microbatch, added to the
step's sum by as much as the microbatch counts (protocol/microbatch/sizes.py), and emptied. (The
boundary's size does not tell what it adds to the weights.) At a data peer a microbatch adds twice:
for the head when it comes to the loss, for the first layers when its gradient is back. Each is
compared with its own kind.

Shapes: B sequences of a step, b of a microbatch, T tokens.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from peer.training.model import FlatModel
from peer.training.optimizer import FlatOptimizer
from peer.training.step import StepResult
from protocol.microbatch import trainer_messages
from protocol.microbatch.sizes import GradientShares
from protocol.wire.stage_messages import Direction

from .channel import StageChannel
from .compute import StageCompute

FIRST_CLIP: Final = 64.0
"""Bound of the first gradient of a trainer's life, in clipping norms of a step."""


class GradientSum:
    """Adds up the microbatches' gradients of a step, each by its share (sizes.py).

    The model's gradient, `gradient_P`, is zero between two microbatches.
    """

    def __init__(self, gradient_P: torch.Tensor, clip_norm: float) -> None:
        self._gradient_P = gradient_P
        self._sum_P = torch.zeros_like(gradient_P)
        self._first = FIRST_CLIP * clip_norm
        self._shares: dict[str, GradientShares] = {}
        self._told = 0

    def add(self, kind: str) -> None:
        """Take the model's gradient, of a microbatch; it is compared with others of its kind."""
        shares = self._shares.setdefault(kind, GradientShares(self._first))
        share = shares.share(length_of(self._gradient_P))
        if share:
            self._sum_P.add_(self._gradient_P, alpha=share)
        self._gradient_P.zero_()

    def take(self) -> int:
        """Put the sum into the model's gradient. Returns how many were clipped since the last."""
        self._gradient_P.copy_(self._sum_P)
        self._sum_P.zero_()
        clipped = sum(shares.num_clipped for shares in self._shares.values())
        new, self._told = clipped - self._told, clipped
        return new


def length_of(values_P: torch.Tensor) -> float:
    """The Euclidean norm, also where the sum of squares is beyond fp32."""
    norm = float(torch.linalg.vector_norm(values_P))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(values_P.double()))


@dataclass(eq=False)
class _StageStepper:
    _compute: StageCompute
    _channel: StageChannel
    _model: FlatModel
    optimizer: FlatOptimizer

    def __post_init__(self) -> None:
        self._channel.between_steps = self.between_steps
        self._gradients = GradientSum(self._model.gradient_P, self.optimizer.clip_norm)
        self._losses: list[float] = []
        self._last_loss = 0.0

    def between_steps(self) -> None:
        """Do what has come while the inner loop waits; a data peer asks for its microbatches."""

    def _take(self, microbatches: int, learning_rate: float) -> StepResult:
        """Step with the mean gradient of these microbatches, and tell the daemon.

        The loss is their mean, nats per token; without one, that of the step before.
        """
        clipped = self._gradients.take()
        norm = torch.zeros((), device=self._model.device)
        if microbatches:
            self._model.gradient_P.div_(microbatches)
            norm = self.optimizer.step(learning_rate)
        else:
            self._model.gradient_P.zero_()
        self._channel.emit(trainer_messages.Stepped(microbatches, clipped))
        if self._losses:
            self._last_loss = sum(self._losses) / len(self._losses)
            self._losses.clear()
        return StepResult(torch.tensor(self._last_loss, device=self._model.device), norm)


@dataclass(eq=False)
class DataPeerStepper(_StageStepper):
    """Steps stage 0, which holds the data.

    Attributes:
        sequences: b, of a microbatch.
        in_flight: microbatches on their way at once, at most.
    """

    reads_blocks = True
    sequences: int
    in_flight: int
    _next: int = 0

    def step(self, blocks_BT: npt.NDArray[np.int64], learning_rate: float) -> StepResult:
        """Train on these blocks, [B, T+1] tokens. Raises Interrupted."""
        parts = deque(torch.from_numpy(blocks_BT).to(self._model.device).split(self.sequences))
        self._channel.emit(trainer_messages.Begun(len(parts)))
        returned, under_way = 0, set[int]()
        while parts or under_way:
            while parts and len(under_way) < self.in_flight:
                under_way.add(self._begin(parts.popleft()))
            command = self._channel.next_task()
            if isinstance(command, trainer_messages.Drop) and command.number in under_way:
                self._compute.forget(command.number)
                under_way.remove(command.number)
            elif isinstance(command, trainer_messages.Resend) and command.number in under_way:
                produced_bTD = self._compute.produced(command.number)
                self._channel.send(Direction.FORWARD, command.number, produced_bTD)
            elif isinstance(command, trainer_messages.Filled) and self._deliver(command):
                under_way.remove(command.number)
                returned += 1
        return self._take(returned, learning_rate)

    def loss_of(self, blocks_BT: npt.NDArray[np.int64]) -> float | None:
        """Mean loss of [B, T+1] tokens, nats per token; None if none came back. Raises Interrupted.

        Other peers' weights are those of the moment that a microbatch comes to them.
        """
        parts = deque(torch.from_numpy(blocks_BT).to(self._model.device).split(self.sequences))
        under_way, losses = dict[int, torch.Tensor](), list[float]()
        while parts or under_way:
            while parts and len(under_way) < self.in_flight:
                microbatch, tokens_bT = self._number(), parts.popleft()
                under_way[microbatch] = tokens_bT
                self._channel.send(
                    Direction.SCORE, microbatch, self._compute.score_embed(tokens_bT)
                )
            command = self._channel.next_task()
            if (
                not isinstance(command, trainer_messages.Filled | trainer_messages.Drop)
                or command.number not in under_way
            ):
                continue
            tokens_bT = under_way.pop(command.number)
            if isinstance(command, trainer_messages.Filled):
                losses.append(self._compute.score_loss(self._channel.read(command), tokens_bT))
        return sum(losses) / len(losses) if losses else None

    def _number(self) -> int:
        microbatch, self._next = self._next, self._next + 1
        return microbatch

    def _begin(self, tokens_bT: torch.Tensor) -> int:
        microbatch = self._number()
        self._channel.send(
            Direction.FORWARD, microbatch, self._compute.embed(microbatch, tokens_bT)
        )
        return microbatch

    def _deliver(self, command: trainer_messages.Filled) -> bool:
        """Take a boundary; returns whether its microbatch is done."""
        microbatch = command.number
        if not self._compute.holds(microbatch):
            self._channel.emit(trainer_messages.Freed(command.slot))
            return False
        boundary_bTD = self._channel.read(command)
        if command.direction == Direction.FORWARD:
            is_new = not self._compute.is_finished(microbatch)
            loss, gradient_bTD = self._compute.finish(microbatch, boundary_bTD)
            if is_new:
                self._losses.append(loss)
            self._channel.send(Direction.BACKWARD, microbatch, gradient_bTD, loss)
            self._compute.add_weights()
            if is_new:
                self._gradients.add(Direction.FORWARD)
            return False
        self._compute.backward(microbatch, boundary_bTD)
        self._compute.add_weights()
        self._gradients.add(Direction.BACKWARD)
        self._channel.emit(trainer_messages.GradientAdded(microbatch))
        return True


class RelayStepper(_StageStepper):
    """Steps a stage that works for the data peers."""

    reads_blocks = False

    def step(self, _blocks_BT: npt.NDArray[np.int64], learning_rate: float) -> StepResult:
        """Do what comes until the daemon says that it is all. Raises Interrupted."""
        done = 0
        while not isinstance(command := self._channel.next_task(), trainer_messages.Finish):
            if isinstance(command, trainer_messages.Drop):
                self._compute.forget(command.number)
            elif isinstance(command, trainer_messages.Filled):
                done += self._deliver(command)
        # It may have come together with the end, and nothing looks between steps.
        self.between_steps()
        return self._take(done, learning_rate)

    def _deliver(self, command: trainer_messages.Filled) -> int:
        """Take a boundary; returns how many gradients that adds."""
        microbatch = command.number
        if command.direction == Direction.SCORE:
            self._score(command)
            return 0
        if command.direction == Direction.FORWARD:
            produced_bTD = self._compute.forward(microbatch, self._channel.read(command))
            self._channel.send(Direction.FORWARD, microbatch, produced_bTD)
            return 0
        if not self._compute.holds(microbatch):
            self._channel.emit(trainer_messages.Freed(command.slot))
            return 0
        received_bTD = self._channel.read(command)
        gradient_bTD = self._compute.backward(microbatch, received_bTD, adds=command.adds)
        assert gradient_bTD is not None, "a relay is given activations"
        if command.loss is not None and command.adds:
            self._losses.append(command.loss)
        self._channel.send(Direction.BACKWARD, microbatch, gradient_bTD, command.loss)
        self._compute.add_weights()
        if command.adds:
            self._gradients.add(Direction.BACKWARD)
        self._channel.emit(trainer_messages.GradientAdded(microbatch))
        return int(command.adds)

    def between_steps(self) -> None:
        """Do the forwards that no gradient follows. Raises Interrupted."""
        for command in self._channel.scores():
            self._score(command)

    def loss_of(self, _blocks_BT: npt.NDArray[np.int64]) -> float | None:
        return None

    def _score(self, command: trainer_messages.Filled) -> None:
        produced_bTD = self._compute.score_through(self._channel.read(command))
        self._channel.send(Direction.SCORE, command.number, produced_bTD)


def stage_clip_norm(clip_norm: float, stages: int) -> float:
    return clip_norm / math.sqrt(stages)
