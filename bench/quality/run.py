"""One run: the replicas of one arm train together, with the project's outer step.

At the close of a round each replica's weights are coded and exchanged (snapshot). Training goes on
for the arm's delay; then comes the outer step, and theta takes over the move of the slow weights as
the trainer does (peer/training/snapshot.py): theta += phi' - decoded. After the last step nothing
is delayed.
"""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.report import machine
from peer.averaging.noloco import outer_step
from peer.training.corpus import Corpus, open_corpus, prepare_corpus
from peer.training.device import Precision, choose_device, choose_precision
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import FlatAdamW
from peer.training.schedule import learning_rate
from peer.training.step import Stepper
from protocol.data_plan import DataPlan
from protocol.run_spec import RunSpec

from .arms import Arm
from .exchange import Shared, exchange_of
from .measures import mean, replica_deviation
from .pairing import groups_of_round, peer_names
from .replicas import Blocks, LoopedReplicas, Replicas, StackedReplicas
from .settings import Setting


@dataclass(slots=True)
class Result:
    """What one run found.

    Attributes:
        losses: of each replica's slow weights, nats per token of the held-out text.
        averaged_loss: of the mean of all slow weights.
        curve: step, mean loss of the replicas, loss of their mean.
        deviations: of each round: step, learning rate, replica deviation of the slow weights and of
            the fast ones before averaging.
        bytes_per_parameter: sent by a node on average, in the whole run.
        resent_share: blocks sent again, of all.
    """

    arm: dict[str, Any]
    setting: dict[str, Any]
    seed: int
    parameters: int
    losses: list[float] = field(default_factory=list)
    averaged_loss: float = 0.0
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    deviations: list[tuple[int, float, float, float]] = field(default_factory=list)
    bytes_per_parameter: float = 0.0
    resent_share: float = 0.0
    seconds: float = 0.0
    machine: dict[str, Any] = field(default_factory=machine)

    @property
    def loss(self) -> float:
        """Mean over the replicas."""
        return mean(self.losses)


@dataclass(frozen=True, slots=True)
class World:
    """What all arms of one seed share: data, the order in which it is trained, the device."""

    setting: Setting
    spec: RunSpec
    corpus: Corpus
    vocabulary: int
    device: torch.device
    precision: Precision

    @classmethod
    def open(cls, setting: Setting, seed: int, cache_dir: Path) -> "World":
        """Pack the corpus, or find it in `cache_dir`."""
        spec = setting.spec(seed)
        prepared = prepare_corpus(spec, cache_dir)
        corpus = open_corpus(prepared.path, spec.model.context_length, setting.final_blocks)
        device = choose_device("auto")
        precision = choose_precision("auto", device)
        return cls(setting, spec, corpus, prepared.vocabulary_size, device, precision)

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        return learning_rate(self.spec.optimizer, step, self.setting.steps)


class Feed:
    """The blocks that each replica trains next, by the run's data plan."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._names = peer_names(world.setting.replicas)
        self._members = [(name, 1) for name in self._names]
        self._plan = DataPlan(world.spec.seed, world.corpus.num_blocks)
        self._stands = dict.fromkeys(self._names, (0, 0))

    def next_blocks(self) -> Blocks:
        """[N, B, T + 1] tokens."""
        rows = []
        for name in self._names:
            epoch, position = self._stands[name]
            count = self._world.setting.batch_size
            taken = self._plan.take(epoch, position, count, name, self._members)
            self._stands[name] = taken.epoch, taken.position
            rows.append(self._world.corpus.blocks(taken.blocks))
        return np.stack(rows)


class _Run:
    def __init__(self, world: World, arm: Arm, start_P: torch.Tensor | None) -> None:
        self._world, self._arm = world, arm
        setting = world.setting
        self._count = 1 if arm.group == "gradients" else setting.replicas
        self._replicas = replicas_of(world, self._count)
        if start_P is not None:
            for theta_P in self._replicas.thetas:
                theta_P.copy_(start_P)
        self._phis = [theta_P.clone() for theta_P in self._replicas.thetas]
        self._deltas = [torch.zeros_like(phi_P) for phi_P in self._phis]
        self._exchange = exchange_of(arm.code)
        self._pending: tuple[Shared, list[tuple[int, ...]]] | None = None
        self._judge = Judge(world)
        parameters = self._judge.model.layout.parameters
        self.result = Result(asdict(arm), asdict(setting), world.spec.seed, parameters)
        self._sent_bytes, self._resent_blocks = 0.0, 0

    def train(self) -> None:
        """All steps and rounds, then the last figures."""
        started_s = time.perf_counter()
        arm, setting = self._arm, self._world.setting
        inner_steps = arm.inner_steps(setting.inner_steps)
        if setting.steps % inner_steps:
            raise ValueError(f"{setting.steps} steps are no whole rounds of {inner_steps}")
        delay = arm.delay_steps(setting.inner_steps)
        feed = Feed(self._world)
        for done in range(1, setting.steps + 1):
            self._inner_step(feed.next_blocks(), self._world.rate(done - 1))
            if self._pending and done % inner_steps == delay:
                self._apply(done)
            if self._averages_weights and done % inner_steps == 0:
                self._close(done // inner_steps - 1)
                if not delay or done == setting.steps:
                    self._apply(done)
            if done % setting.curve_every == 0:
                self._note_curve(done)
        self._finish()
        self.result.seconds = round(time.perf_counter() - started_s, 1)

    @property
    def _averages_weights(self) -> bool:
        return self._arm.group in ("pairs", "all")

    def _inner_step(self, blocks_NBT: Blocks, rate: float) -> None:
        if self._arm.group == "gradients":
            # The mean of the replicas' gradients is the gradient of all their blocks.
            self._replicas.step(blocks_NBT.reshape(1, -1, blocks_NBT.shape[-1]), rate)
            self._sent_bytes += self._ring_bytes()
        else:
            self._replicas.step(blocks_NBT, rate)

    def _ring_bytes(self) -> float:
        """Bytes of all nodes for one all-reduce of fp32 gradients."""
        return 4.0 * self._phis[0].numel() * 2 * (self._world.setting.replicas - 1)

    def _close(self, round_: int) -> None:
        run_id = f"quality-{self._world.spec.seed}"
        groups = groups_of_round(self._arm.group, run_id, round_, self._count)
        self._pending = self._exchange.share(self._replicas.thetas, groups), groups

    def _apply(self, step: int) -> None:
        assert self._pending is not None
        (shared, groups), self._pending = self._pending, None
        for group in groups:
            for own in group:
                others = [shared.codes[other] for other in group if other != own]
                codes = [shared.codes[own], *others]
                outer_step(
                    self._phis[own], self._deltas[own], codes, shared.codec, self._arm.factors
                )
        fast = replica_deviation(shared.decoded, self.result.parameters)
        slow = replica_deviation(self._phis, self.result.parameters)
        self.result.deviations.append((step, self._world.rate(step - 1), slow, fast))
        for theta_P, phi_P, decoded_P in zip(
            self._replicas.thetas, self._phis, shared.decoded, strict=True
        ):
            theta_P.add_(phi_P - decoded_P)
        self._sent_bytes += shared.sent_bytes
        self._resent_blocks += shared.resent_blocks

    def _slow(self) -> list[torch.Tensor]:
        """The weights that are judged; the fast ones, where there are no slow ones."""
        return self._phis if self._averages_weights else list(self._replicas.thetas)

    def _note_curve(self, step: int) -> None:
        losses, averaged = self._judge.losses(self._slow(), self._world.setting.curve_blocks)
        self.result.curve.append((step, mean(losses), averaged))
        if self._arm.group == "nobody":
            apart = replica_deviation(self._slow(), self.result.parameters)
            self.result.deviations.append((step, self._world.rate(step - 1), apart, apart))

    def _finish(self) -> None:
        result, setting = self.result, self._world.setting
        losses, averaged = self._judge.losses(self._slow(), setting.final_blocks)
        result.losses, result.averaged_loss = losses, averaged
        values = self._phis[0].numel() * setting.replicas
        result.bytes_per_parameter = self._sent_bytes / values
        blocks = values / 128 * max(1, len(result.deviations))
        result.resent_share = self._resent_blocks / blocks

    def averaged(self) -> torch.Tensor:
        """The mean of all slow weights."""
        return torch.stack(self._slow()).mean(0)


class Judge:
    """Measures losses on the held-out blocks, with a model of its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.model = FlatModel(initial_module(world.spec, world.vocabulary), world.device)
        optimizer = FlatAdamW(self.model, world.spec.optimizer)
        self._stepper = Stepper(self.model, optimizer, world.precision, 64 if _cuda(world) else 8)

    def losses(self, vectors: list[torch.Tensor], num_blocks: int) -> tuple[list[float], float]:
        """Loss of each vector of weights, and of their mean."""
        mean_P = torch.stack(vectors).mean(0)
        found = [self.loss(vector_P, num_blocks) for vector_P in (*vectors, mean_P)]
        return found[:-1], found[-1]

    def loss(self, vector_P: torch.Tensor, num_blocks: int) -> float:
        """Loss of these weights."""
        self.model.theta_P.copy_(vector_P)
        return self._stepper.loss_of(self._world.corpus.validation_blocks(num_blocks))


def _cuda(world: World) -> bool:
    return world.device.type == "cuda"


def replicas_of(world: World, count: int) -> Replicas:
    """`count` replicas with the weights of the seed, made for the device."""
    if _cuda(world) and count > 1:
        return StackedReplicas(world.spec, count, world.vocabulary, world.device, world.precision)
    micro_batch = world.setting.batch_size
    if _cuda(world):
        micro_batch *= world.setting.replicas
    return LoopedReplicas(
        world.spec, count, world.vocabulary, world.device, world.precision, micro_batch
    )


def train_arm(
    world: World, arm: Arm, start_P: torch.Tensor | None = None
) -> tuple[Result, torch.Tensor]:
    """Run one arm. Returns what it found, and the mean of the slow weights [P].

    Args:
        start_P: weights that all replicas start from; else those of the seed.
    """
    run = _Run(world, arm, start_P)
    run.train()
    return run.result, run.averaged()
