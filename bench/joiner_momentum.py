"""What does a joiner lose that has the swarm's weights, but not the momentum of its optimizer?

    python -m bench.joiner_momentum [--optimizer adamw muon] [--smoke] [--json FILE]

One replica of the study's model (quality/settings.py, the short setting) trains BEFORE steps with
the batch of WIDE replicas: these are the weights that a joiner is given. From there one peer trains
AFTER steps by itself, on its own batch, in three ways, on the same blocks in the same order:

    kept      with the moments of the training before
    fresh     without any, and the warm-up over its own first steps that trainers have
              (peer/training/schedule.py): what a joiner does
    at once   without any, at the full rate from its first step

Rows are the losses on held-out text less those of `kept`. One seed: what is smaller than what two
orders of the data differ by says nothing. Nobody averages: in a swarm the others' weights damp it.
"""

import math
from pathlib import Path
from typing import Final

import numpy as np
import platformdirs
import torch

from bench.quality.arms import ARMS
from bench.quality.settings import SHORT, SMOKE
from bench.quality.world import World
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import FlatOptimizer, inner_optimizer
from peer.training.schedule import learning_rate
from peer.training.step import Stepper
from protocol.run.run_spec import RunSpec

from .report import Report, Row, options

BEFORE: Final = 128
AFTER: Final = 100
SEEN_AT: Final = (5, 10, 20, 50, 100)
WIDE: Final = 4
HELD_OUT: Final = 64
ARM_OF: Final = {"adamw": "ddp", "muon": "ddp-muon-2"}
"""The arm of the study whose inner optimizer it is."""
WAYS: Final = ("kept", "fresh", "at once")


class Learner:
    """One peer: a model, its optimizer and its place in the schedule."""

    def __init__(self, world: World, spec: RunSpec) -> None:
        self._world, self._spec = world, spec
        self.model = FlatModel(initial_module(spec, world.vocabulary), torch.device("cpu"))
        self.optimizer: FlatOptimizer = inner_optimizer(self.model, spec.optimizer, "fp32")
        self._stepper = Stepper(self.model, self.optimizer, "fp32", world.setting.batch_size)

    def take_over(self, other: "Learner", *, with_moments: bool) -> None:
        """Begin with another's weights, and with its moments or none."""
        self.model.theta_P.copy_(other.model.theta_P)
        if with_moments:
            moments = other.optimizer.moments()

            def fill(name: str, vector: torch.Tensor) -> None:
                vector.copy_(moments[name])

            self.optimizer.take_over(other.optimizer.num_steps, fill)

    def step(self, first_block: int, blocks: int, step: int, own_steps: float) -> None:
        """Train on so many blocks, at the rate of this step."""
        corpus = self._world.corpus
        order = np.random.default_rng(self._spec.seed).permutation(corpus.num_blocks)
        numbers = order[(first_block + np.arange(blocks)) % len(order)]
        total = self._world.setting.steps
        rate = learning_rate(self._spec.optimizer, step, total, own_steps)
        self._stepper.step(corpus.blocks(numbers), rate)

    def loss(self) -> float:
        """On held-out text."""
        return self._stepper.loss_of(self._world.corpus.validation_blocks(HELD_OUT))


def losses_of(world: World, spec: RunSpec, before: int, seen_at: tuple[int, ...]) -> list[Row]:
    """A row for each number of steps after joining."""
    batch = world.setting.batch_size
    swarm = Learner(world, spec)
    for step in range(before):
        swarm.step(step * batch * WIDE, batch * WIDE, step, math.inf)
    first_block = before * batch * WIDE
    found: dict[str, dict[int, float]] = {}
    for way in WAYS:
        peer = Learner(world, spec)
        peer.take_over(swarm, with_moments=way == "kept")
        found[way] = {}
        for own in range(max(seen_at)):
            young = own if way == "fresh" else math.inf
            peer.step(first_block + own * batch, batch, before + own, young)
            if own + 1 in seen_at:
                found[way][own + 1] = peer.loss()
    return [
        {
            "optimizer": spec.optimizer.name,
            "steps": steps,
            "kept": kept,
            "fresh less kept": found["fresh"][steps] - kept,
            "at once less kept": found["at once"][steps] - kept,
        }
        for steps, kept in found["kept"].items()
    ]


def main() -> None:
    """Measure and publish."""
    parser = options(__doc__)
    parser.add_argument("--optimizer", nargs="+", choices=ARM_OF, default=list(ARM_OF))
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny model")
    cache = Path(platformdirs.user_cache_dir("loco-peer"))
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR", help="for the corpus")
    chosen = parser.parse_args()
    world = World.open(SMOKE if chosen.smoke else SHORT, 0, chosen.cache)
    before, seen_at = (4, (2, 4)) if chosen.smoke else (BEFORE, SEEN_AT)
    report = Report("joiner_momentum", "A joiner without the momentum of its optimizer")
    report.settings = {"setting": world.setting.name, "before": before, "seed": 0}
    for name in chosen.optimizer:
        spec = ARMS[ARM_OF[name]].spec(world.spec)
        report.rows += losses_of(world, spec, before, seen_at)
    report.publish(chosen.json)


if __name__ == "__main__":
    main()
