"""A study: the runs of some arms and seeds, made where they are missing, and its options."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import platformdirs

from bench.report import options

from .runs import AnyArm
from .store import ResultT, Store
from .world import World

ArmT = TypeVar("ArmT", bound=AnyArm)


class Study(Generic[ArmT, ResultT]):
    """Makes the runs that are missing, and gathers all.

    Args:
        train: makes one run of an arm.
    """

    def __init__(
        self, store: Store[ResultT], cache_dir: Path, train: Callable[[World, ArmT], ResultT]
    ) -> None:
        self._store, self._cache_dir, self._train = store, cache_dir, train

    def gather(
        self, arms: Iterable[ArmT], seeds: Iterable[int], *, made_only: bool
    ) -> dict[str, dict[int, ResultT]]:
        """Results by arm and seed.

        Args:
            made_only: make none.
        """
        chosen = list(arms)
        runs: dict[str, dict[int, ResultT]] = {arm.name: {} for arm in chosen}
        for seed in seeds:
            for arm in chosen:
                result = self._store.load(arm, seed)
                if result is None and not made_only:
                    result = self._make(arm, seed)
                if result is not None:
                    runs[arm.name][seed] = result
        return runs

    def _make(self, arm: ArmT, seed: int) -> ResultT:
        result = self._train(World.open(self._store.setting, seed, self._cache_dir), arm)
        self._store.save(arm, result)
        print(f"{arm.name}, seed {seed}: {result.loss:.4f} in {result.seconds:.0f} s", flush=True)
        return result


def study_options(
    description: str | None, arms: Mapping[str, AnyArm], results: Path
) -> argparse.ArgumentParser:
    """The options of a study of these arms, whose results lie in that file."""
    parser = options(description)
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny model")
    known = f"of {', '.join(arms)}"
    parser.add_argument("--arms", type=_names_in(arms), metavar="A,B", help=known)
    parser.add_argument("--seeds", type=_seeds, default=[0, 1, 2], metavar="A,B")
    parser.add_argument("--results", type=Path, default=results, metavar="FILE")
    parser.add_argument(
        "--made-only", action="store_true", help="show what there is, train nothing"
    )
    cache = Path(platformdirs.user_cache_dir("loco-peer"))
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR", help="for the corpus")
    return parser


def _names_in(arms: Mapping[str, AnyArm]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        wanted = text.split(",")
        if unknown := set(wanted) - set(arms):
            raise argparse.ArgumentTypeError(f"no such arm: {', '.join(sorted(unknown))}")
        return wanted

    return names


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]
