"""What runs leave in the cache: themselves half-way, and weights where late settings begin.

Those are weights that ddp has trained in the setting before, one per seed.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .arms import ARMS, Arm
from .halfway import Halfway
from .run import Result, train_arm
from .settings import Setting
from .world import World


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Those of one setting, in one folder."""

    base: Setting
    folder: Path

    def train(self, world: World, arm: Arm) -> Result:
        """One run, from the checkpoint if its setting begins with one.

        A run of ddp from the start leaves the checkpoint of its seed.
        """
        seed = world.spec.seed
        halfway = Halfway(
            self.folder / f"halfway-{world.setting.name}-{arm.name}-{seed}.safetensors"
        )
        start_P = self.of_seed(seed) if world.setting.trained_steps else None
        result, mean_P = train_arm(world, arm, start_P, halfway)
        if arm == ARMS["ddp"] and start_P is None:
            self._keep(mean_P, seed)
        halfway.remove()
        return result

    def of_seed(self, seed: int) -> torch.Tensor:
        """Weights [P] that ddp has trained, now or earlier."""
        if not self._kept(seed).exists():
            world = World.open(self.base, seed, self.folder)
            self._keep(train_arm(world, ARMS["ddp"])[1], seed)
        return load_file(self._kept(seed))["theta"]

    def _keep(self, theta_P: torch.Tensor, seed: int) -> None:
        save_file({"theta": theta_P.cpu()}, self._kept(seed))

    def _kept(self, seed: int) -> Path:
        return self.folder / f"quality-{self.base.name}-{seed}.safetensors"
