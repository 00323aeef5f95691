"""One run of the study of training over stages.

Judged are the fast weights at the end, in fp32, with all stages in their order; where a stage has
replicas, the mean over the columns. Then stages are left out, as a reader might who has no machine
for them: stage 0 and every choice of so many relay stages, in order.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

import torch

from bench.quality.exchange import CodecExchange
from bench.quality.feed import Feed
from bench.quality.measures import mean, replica_deviation
from bench.quality.pairing import groups_of_round
from bench.quality.world import World
from bench.report import machine
from peer.averaging.gossip.outer_step import NolocoFactors, outer_step
from peer.codec import get_codec
from peer.training.schedule import learning_rate
from protocol.run.run_spec import SyncSection

from .arms import StageArm
from .clocks import iteration_s, steps_of
from .pipeline import Pipeline
from .stage import Stage


@dataclass(slots=True)
class StageResult:
    """The result of one run; losses in nats per token of the held-out text.

    Attributes:
        loss: with all stages.
        curve: step, mean training loss since the point before, held-out loss with all stages.
        left_out: stages visited to the loss of each choice of them.
        deviations: with several columns: step, and how far the replicas of a stage lie apart, mean
            over the stages; before averaging where there is any.
        norms: mean over the steps of each stage's gradient norm before clipping.
        clipped_share: of all steps of all stages, those that the norm of the stage clipped.
        iteration_s: on the simulated machines; None where no plan is like this arm.
        steps, tokens: trained.
    """

    arm: dict[str, Any]
    setting: dict[str, Any]
    seed: int
    parameters: int
    loss: float = 0.0
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    left_out: dict[str, list[float]] = field(default_factory=dict)
    deviations: list[tuple[int, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped_share: float = 0.0
    iteration_s: float | None = None
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    machine: dict[str, Any] = field(default_factory=machine)


class Gossip:
    """Averages the replicas of each stage in pairs, as the run spec's default does it."""

    def __init__(self, pipeline: Pipeline, seed: int) -> None:
        sync = SyncSection()
        self._factors = NolocoFactors(sync.alpha, sync.beta, sync.beta)
        self._codec = get_codec("fp32")
        self._run_id = f"stages-{seed}"
        self._stages = pipeline.stages
        self._phis = [[_weights(each).clone() for each in replicas] for replicas in self._stages]
        self._deltas = [[torch.zeros_like(phi_P) for phi_P in phis] for phis in self._phis]
        self._round = 0

    def average(self) -> None:
        """One round: pairs, the outer step, and its weights taken over."""
        for number, replicas in enumerate(self._stages):
            run_id = f"{self._run_id}/{number}"
            groups = groups_of_round("pairs", run_id, self._round, len(replicas))
            shared = CodecExchange(self._codec).share([_weights(each) for each in replicas], groups)
            for group in groups:
                for own in group:
                    codes = [shared.codes[own], *(shared.codes[i] for i in group if i != own)]
                    phi_P = self._phis[number][own]
                    delta_P = self._deltas[number][own]
                    outer_step(phi_P, delta_P, codes, shared.codec, self._factors)
                    _weights(replicas[own]).copy_(phi_P)
        self._round += 1


class _Run:
    def __init__(self, world: World, arm: StageArm) -> None:
        self._world, self._arm = world, arm
        batch_size = world.setting.batch_size // arm.columns
        self._pipeline = Pipeline(world, arm, batch_size)
        seed = world.spec.seed
        self._feed = Feed(world.corpus, seed, batch_size, arm.columns)
        self._gossip = Gossip(self._pipeline, seed) if arm.gossip else None
        self._steps = steps_of(arm, world.setting.steps)
        self.result = StageResult(
            asdict(arm), asdict(world.setting), seed, self._pipeline.parameters
        )

    def train(self) -> None:
        """Train all steps, then take the last figures."""
        setting, losses = self._world.setting, list[float]()
        for step in range(1, self._steps + 1):
            rate = learning_rate(self._world.spec.optimizer, step - 1, self._steps)
            blocks = self._feed.next_blocks()
            losses.append(self._pipeline.step(blocks, self._arm.rate_of * rate))
            if self._arm.columns > 1 and step % setting.inner_steps == 0:
                self._close(step)
            if step % setting.curve_every == 0 or step == self._steps:
                found = self._loss(setting.curve_blocks)
                self.result.curve.append((step, mean(losses), found))
                losses.clear()
        self._finish()

    def _close(self, step: int) -> None:
        apart = [
            replica_deviation([_weights(each) for each in replicas], _parameters(replicas))
            for replicas in self._pipeline.stages
        ]
        self.result.deviations.append((step, mean(apart)))
        if self._gossip is not None:
            self._gossip.average()

    def _loss(self, num_blocks: int, relays: Sequence[int] | None = None) -> float:
        blocks_BT = self._world.corpus.validation_blocks(num_blocks)
        chosen = range(1, self._arm.stages) if relays is None else relays
        return mean(
            [
                self._pipeline.loss_of(blocks_BT, tuple(chosen), column)
                for column in range(self._arm.columns)
            ]
        )

    def _finish(self) -> None:
        result, setting, arm = self.result, self._world.setting, self._arm
        result.loss = self._loss(setting.final_blocks)
        if arm.columns == 1:
            for visited in range(arm.stages, 1, -1):
                relays_of = combinations(range(1, arm.stages), visited - 1)
                result.left_out[str(visited)] = [
                    self._loss(setting.curve_blocks, relays) for relays in relays_of
                ]
        stages = self._pipeline.stages
        result.norms = [mean([n for each in replicas for n in each.norms]) for replicas in stages]
        norms = [n for replicas in stages for each in replicas for n in each.norms]
        limit = self._pipeline.clip_norm
        result.clipped_share = sum(norm > limit for norm in norms) / len(norms)
        result.iteration_s = iteration_s(arm)
        result.steps = self._steps
        result.tokens = self._steps * self._world.spec.tokens_per_step


def train_stages(world: World, arm: StageArm) -> StageResult:
    """Run one arm."""
    started_s = time.perf_counter()
    run = _Run(world, arm)
    run.train()
    run.result.seconds = round(time.perf_counter() - started_s, 1)
    return run.result


def _weights(stage: Stage) -> torch.Tensor:
    return stage.model.theta_P


def _parameters(replicas: Sequence[Stage]) -> int:
    return replicas[0].model.layout.parameters
