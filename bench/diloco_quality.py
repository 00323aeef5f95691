"""Quality of streaming DiLoCo against plain DiLoCo at equal tokens: real text, the project's model.

    python -m bench.diloco_quality [--full] [--arms A,B] [--seeds 0,1,2]

M = 4 replicas in one process (bench/quality/fragment_swarm.py). Arms are in
quality/streaming_arms.py, sizes in quality/settings.py. Each run (arm and seed) leaves one file in
the results folder and is not made again; a study that was stopped goes on where it was. The tables
are of all runs found, of the arms and seeds asked for.

Goal, as in the paper (Streaming DiLoCo, arXiv 2501.18512, table 5: 0.01 nats at most): fragments,
overlap, merging and codes leave the loss of the slow weights within 0.02 nats of plain DiLoCo's at
equal H.

The short setting has ten rounds at H = 30, and only three at H = 100. Its model of four blocks
makes three fragments of two blocks (two of them, and the rest), or five of one.
"""

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Final

import platformdirs

from bench.quality import streaming_findings as findings
from bench.quality.run import World
from bench.quality.settings import STREAMING_FULL, STREAMING_SHORT, STREAMING_SMOKE, Setting
from bench.quality.store import Store
from bench.quality.streaming import StreamingResult, train_streaming_arm
from bench.quality.streaming_arms import STREAMING_ARMS, StreamingArm
from bench.report import Report, options

RESULTS: Final = Path(__file__).parent / "results" / "diloco_quality"


def gather(
    setting: Setting,
    arms: Iterable[StreamingArm],
    seeds: Iterable[int],
    results: Path,
    cache_dir: Path,
    *,
    made_only: bool,
) -> findings.Runs:
    """Results by arm and seed; makes those that are missing, unless told not to."""
    store = Store(results, setting, StreamingResult)
    chosen = list(arms)
    runs: dict[str, dict[int, StreamingResult]] = {arm.name: {} for arm in chosen}
    for seed in seeds:
        for arm in chosen:
            result = store.load(arm, seed)
            if result is None and not made_only:
                result = train_streaming_arm(World.open(setting, seed, cache_dir), arm)
                store.save(arm, result)
                print(
                    f"{arm.name}, seed {seed}: {result.loss:.4f} in {result.seconds:.0f} s",
                    flush=True,
                )
            if result is not None:
                runs[arm.name][seed] = result
    return runs


def main() -> None:
    arguments = _options().parse_args()
    setting = STREAMING_FULL if arguments.full else STREAMING_SHORT
    setting = STREAMING_SMOKE if arguments.smoke else setting
    runs = gather(
        setting,
        [STREAMING_ARMS[name] for name in arguments.arms],
        arguments.seeds,
        arguments.results,
        arguments.cache,
        made_only=arguments.made_only,
    )
    report = Report("diloco_quality", f"Streaming DiLoCo and plain DiLoCo, {setting.name}")
    report.settings = asdict(setting)
    report.rows = findings.rows(runs)
    report.goals = findings.goals(runs)
    report.notes = findings.notes(runs)
    report.publish(arguments.json)


def _options() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny model")
    parser.add_argument(
        "--arms", type=_names, metavar="A,B", default=list(STREAMING_ARMS), help="all by default"
    )
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
    if unknown := set(names) - set(STREAMING_ARMS):
        raise argparse.ArgumentTypeError(f"no such arm: {', '.join(sorted(unknown))}")
    return names


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]


if __name__ == "__main__":
    main()
