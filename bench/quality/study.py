"""A study: the runs of some arms and seeds, made where they are missing, and its options."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import platformdirs
import torch
from safetensors.torch import load_file, save_file

from bench.report import options

from .arms import ARMS, Arm
from .findings import Runs
from .run import Result, World, train_arm
from .settings import LATE_OF, Setting
from .store import Store


class Study:
    """Makes the runs that are missing, and gathers all.

    Args:
        late: start from a checkpoint that ddp has trained in the setting `base`.
    """

    def __init__(
        self, base: Setting, results: Path, cache_dir: Path, *, late: bool = False
    ) -> None:
        self._base = base
        self.setting = LATE_OF[base.name] if late else base
        self._cache_dir = cache_dir
        self._store = Store(results, self.setting)

    def gather(self, arms: Iterable[Arm], seeds: Iterable[int], *, made_only: bool) -> Runs:
        """Results by arm and seed.

        Args:
            made_only: make none.
        """
        chosen = list(arms)
        runs: dict[str, dict[int, Result]] = {arm.name: {} for arm in chosen}
        for seed in seeds:
            for arm in chosen:
                result = self._store.load(arm, seed)
                if result is None and not made_only:
                    result = self._make(arm, seed)
                if result is not None:
                    runs[arm.name][seed] = result
        return runs

    def _make(self, arm: Arm, seed: int) -> Result:
        start_P = self._checkpoint(seed) if self.setting.trained_steps else None
        result, mean_P = train_arm(World.open(self.setting, seed, self._cache_dir), arm, start_P)
        self._store.save(arm, result)
        if arm.group == "gradients" and start_P is None:
            self._keep(mean_P, seed)
        print(f"{arm.name}, seed {seed}: {result.loss:.4f} in {result.seconds:.0f} s", flush=True)
        return result

    def _checkpoint(self, seed: int) -> torch.Tensor:
        """What DDP has trained in the base setting, now or earlier."""
        if not self._kept(seed).exists():
            world = World.open(self._base, seed, self._cache_dir)
            self._keep(train_arm(world, ARMS["ddp"])[1], seed)
        return load_file(self._kept(seed))["theta"]

    def _keep(self, theta_P: torch.Tensor, seed: int) -> None:
        save_file({"theta": theta_P.cpu()}, self._kept(seed))

    def _kept(self, seed: int) -> Path:
        return self._cache_dir / f"quality-{self._base.name}-{seed}.safetensors"


def study_options(
    description: str | None, arms: Mapping[str, Arm], results: Path
) -> argparse.ArgumentParser:
    """The options of a study of these arms, whose results lie in that folder."""
    parser = options(description)
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny model")
    known = f"of {', '.join(arms)}"
    parser.add_argument("--arms", type=_names_in(arms), metavar="A,B", help=known)
    parser.add_argument("--seeds", type=_seeds, default=[0, 1, 2], metavar="A,B")
    parser.add_argument("--results", type=Path, default=results, metavar="DIR")
    parser.add_argument(
        "--made-only", action="store_true", help="show what there is, train nothing"
    )
    cache = Path(platformdirs.user_cache_dir("loco-peer"))
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR", help="for the corpus")
    return parser


def _names_in(arms: Mapping[str, Arm]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        wanted = text.split(",")
        if unknown := set(wanted) - set(arms):
            raise argparse.ArgumentTypeError(f"no such arm: {', '.join(sorted(unknown))}")
        return wanted

    return names


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]
