"""Quality of NoLoCo and its rivals at equal tokens: real text, the project's model and outer step.

    python -m bench.noloco_quality [--full] [--late] [--arms A,B] [--seeds 0,1,2]

N = 8 replicas in one process. Arms are in quality/arms.py, sizes in quality/settings.py. Each run
(arm and seed) leaves one file in the results folder and is not made again; a study that was stopped
goes on where it was. The tables are of all runs found, of the arms and seeds asked for.

Goals, as in the paper (arXiv 2506.10911): ddp < noloco <= diloco + 2% perplexity, and both far
better than no averaging; the mean of the weights no worse than the replicas; the replicas'
deviation follows the learning rate (Pearson >= 0.9). A code may cost 0.1% of the loss or two
standard errors, whichever is more.
"""

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Final

import platformdirs
import torch
from safetensors.torch import load_file, save_file

from bench.quality import findings
from bench.quality.arms import ARMS, CODE_ARMS, STUDY_ARMS, Arm
from bench.quality.run import Result, World, train_arm
from bench.quality.settings import FULL, LATE_OF, SHORT, SMOKE, Setting
from bench.quality.store import Store
from bench.report import Report, options

RESULTS: Final = Path(__file__).parent / "results" / "noloco_quality"


class Study:
    """Makes the runs that are missing, and gathers all."""

    def __init__(self, base: Setting, results: Path, cache_dir: Path, *, late: bool) -> None:
        self._base = base
        self.setting = LATE_OF[base.name] if late else base
        self._cache_dir = cache_dir
        self._store = Store(results, self.setting, Result)

    def gather(
        self, arms: Iterable[Arm], seeds: Iterable[int], *, made_only: bool
    ) -> findings.Runs:
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


def main() -> None:
    arguments = _options().parse_args()
    base = SMOKE if arguments.smoke else FULL if arguments.full else SHORT
    study = Study(base, arguments.results, arguments.cache, late=arguments.late)
    names = arguments.arms or (CODE_ARMS if arguments.late else STUDY_ARMS)
    runs = study.gather(
        [ARMS[name] for name in names], arguments.seeds, made_only=arguments.made_only
    )
    report = Report("noloco_quality", f"NoLoCo and rivals, {study.setting.name}")
    report.settings = asdict(study.setting)
    report.rows = findings.rows(runs)
    report.goals = findings.goals(runs)
    report.notes = findings.explanation(runs)
    report.publish(arguments.json)


def _options() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny model")
    parser.add_argument("--late", action="store_true", help="codes, from a trained checkpoint")
    parser.add_argument("--arms", type=_names, metavar="A,B", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--seeds", type=_seeds, default=[0, 1, 2], metavar="A,B")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument(
        "--made-only", action="store_true", help="show what there is, train nothing"
    )
    cache = Path(platformdirs.user_cache_dir("loco-peer"))
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR", help="for the corpus")
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(ARMS):
        raise argparse.ArgumentTypeError(f"no such arm: {', '.join(sorted(unknown))}")
    return names


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]


if __name__ == "__main__":
    main()
