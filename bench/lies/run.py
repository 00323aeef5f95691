"""One run: honest peers and liars train and average, and the honest ones are judged."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bench.quality.measures import mean
from bench.quality.replicas import Blocks, Replicas, StackedReplicas
from bench.quality.world import Judge, World
from bench.report import machine
from peer.network.identity import Identity
from peer.training.ports import NonFinite

from .arms import PEERS, SLOWER, HostileArm
from .fragments import FragmentSwarm
from .pairs import GossipSwarm

Swarm = GossipSwarm | FragmentSwarm


@dataclass(slots=True)
class HostileResult:
    """The result of one run; losses in nats per token of the held-out text.

    Attributes:
        start_loss: of the checkpoint.
        losses: of each honest peer's slow weights; all infinite where a run diverged, which is
            where weights are no numbers any more.
        averaged_loss: of the mean of the honest peers' slow weights.
        fast_loss: of the mean of their fast weights.
        lost_share: averages that did not come about, of all; of the honest peers in pairs, of the
            chunks in fragments.
        liars_share: weight of the liars in what was averaged.
        clipped_share: honest vectors that counted less than others.
    """

    arm: dict[str, Any]
    setting: dict[str, Any]
    seed: int
    parameters: int
    start_loss: float = math.inf
    losses: list[float] = field(default_factory=list)
    averaged_loss: float = math.inf
    fast_loss: float = math.inf
    lost_share: float = 0.0
    liars_share: float = 0.0
    clipped_share: float = 0.0
    seconds: float = 0.0
    machine: dict[str, Any] = field(default_factory=machine)

    @property
    def loss(self) -> float:
        """Mean over the honest peers."""
        return mean(self.losses)

    @property
    def diverged(self) -> bool:
        """Whether weights were no numbers in the end."""
        return not math.isfinite(self.loss)


def train_hostile_arm(world: World, arm: HostileArm, start_P: torch.Tensor) -> HostileResult:
    """Run one arm from a checkpoint [P]."""
    started_s = time.perf_counter()
    judge = Judge(world)
    parameters = judge.model.layout.parameters
    result = HostileResult(asdict(arm), asdict(world.setting), world.spec.seed, parameters)
    result.start_loss = judge.loss(start_P, world.setting.final_blocks)
    replicas = _replicas(world, PEERS - arm.absent, start_P)
    swarm = _swarm(world, arm, replicas)
    try:
        _train(world, arm, replicas, swarm)
        _judge(judge, world, swarm, replicas.thetas[: arm.honest], result)
    except (NonFinite, ValueError):  # weights that codes do not take
        result.losses = [math.inf] * arm.honest
    result.lost_share = swarm.figures.lost_share
    result.liars_share = swarm.figures.liars_share
    result.clipped_share = swarm.figures.clipped_share
    result.seconds = round(time.perf_counter() - started_s, 1)
    return result


def _replicas(world: World, count: int, start_P: torch.Tensor) -> StackedReplicas:
    replicas = StackedReplicas(world.spec, count, world.vocabulary, world.device, world.precision)
    with torch.no_grad():
        for theta_P in replicas.thetas:
            theta_P.copy_(start_P)
    return replicas


def _swarm(world: World, arm: HostileArm, replicas: Replicas) -> Swarm:
    identities = [Identity(bytes([n + 1]) * 32) for n in range(len(replicas.thetas))]
    if arm.way == "fragments":
        return FragmentSwarm(replicas.models, world.spec, arm, identities)
    names = [identity.peer_id for identity in identities]
    return GossipSwarm(replicas.thetas, world.spec, arm, names)


def _train(world: World, arm: HostileArm, replicas: StackedReplicas, swarm: Swarm) -> None:
    """All peers that are there train the blocks that they would train among all."""
    peers = range(len(replicas.thetas))
    for step, blocks_NBT in enumerate(_blocks(world), start=1):
        active = [peer for peer in peers if not (arm.slow and peer % 2 and step % SLOWER)]
        replicas.step(blocks_NBT[active], world.rate(step - 1), active)
        swarm.after_step(step)
    swarm.settle()


def _judge(
    judge: Judge,
    world: World,
    swarm: Swarm,
    honest_thetas: Sequence[torch.Tensor],
    result: HostileResult,
) -> None:
    blocks = world.setting.final_blocks
    losses, averaged = judge.losses(swarm.judged(), blocks)
    fast = judge.loss(torch.stack([theta_P.detach() for theta_P in honest_thetas]).mean(0), blocks)
    if not all(map(math.isfinite, (*losses, averaged, fast))):
        raise ValueError("losses that are no numbers")
    result.losses, result.averaged_loss, result.fast_loss = losses, averaged, fast


_made: dict[tuple[str, int], list[Blocks]] = {}


def _blocks(world: World) -> list[Blocks]:
    """The blocks of all peers in each step, the same in all arms; those of the last seed are kept.

    To plan them takes a third as long as to train them.
    """
    key = (world.setting.name, world.spec.seed)
    if key not in _made:
        _made.clear()
        feed = world.feed()
        _made[key] = [feed.next_blocks() for _ in range(world.setting.steps)]
    return _made[key]
