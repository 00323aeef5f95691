"""The world that runs share, the replicas that train in it, and the judge of their weights."""

from dataclasses import dataclass
from pathlib import Path

import torch

from peer.training.corpus.blocks import Corpus, open_file
from peer.training.corpus.folder import prepare_corpus
from peer.training.device import Precision, choose_device, choose_precision
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import inner_optimizer
from peer.training.schedule import learning_rate
from peer.training.step import Stepper
from protocol.run.run_spec import RunSpec

from .feed import Feed
from .replicas import LoopedReplicas, Replicas, StackedReplicas
from .settings import Setting


@dataclass(frozen=True, slots=True)
class World:
    """The world that all arms of one seed share: data, its order, the device."""

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
        tokens = prepared.whole
        assert tokens is not None, "it was made here"
        corpus = open_file(tokens, spec.model.context_length, setting.final_blocks)
        device = choose_device("auto")
        precision = choose_precision(setting.precision, device)
        return cls(setting, spec, corpus, prepared.manifest.vocabulary_size, device, precision)

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        return learning_rate(self.spec.optimizer, step, self.setting.steps)

    def feed(self) -> Feed:
        """The feed of all replicas of the setting."""
        return Feed(self.corpus, self.spec.seed, self.setting.batch_size, self.setting.replicas)


class Judge:
    """Measures losses on the held-out blocks, with a model of its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.model = FlatModel(initial_module(world.spec, world.vocabulary), world.device)
        optimizer = inner_optimizer(self.model, world.spec.optimizer, world.precision)
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
