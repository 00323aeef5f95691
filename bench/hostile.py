"""What lies cost in learning: 16 peers, of whom 2 or 5 lie, and the daemon's own defences.

    python -m bench.hostile [--smoke | --full] [--arms A,B] [--seeds 0,1,2]

Both ways of averaging: pairs (NoLoCo; lies/pairs.py) and fragments among all (streaming DiLoCo;
lies/fragments.py), with the run spec's factors and codes. Attacks are in lies/liars.py, arms in
lies/arms.py, sizes in lies/settings.py: a late phase, where all peers start from one checkpoint.
Without options one seed of the main attacks is run; `--full` runs all arms, those without defences
(`off`) with the first seed alone; owners are audited where the name ends so. Each run leaves one
line in the results file and is not made again; a study that was stopped goes on where it was. The
tables are of all runs found.

A liar trains as the others do and lies in what it sends alone. Losses are those of the honest
peers' slow weights; `costs` is the distance to a run of the same honest peers, with the same data,
without liars. `lost` are averages that did not come about (of honest peers in pairs, of chunks in
fragments), `liars'` is the weight of liars in those that did. `clipped` are honest vectors that
counted less than others.

Goals: at two liars of 16 no attack costs more than 0.02 nats; with five nothing diverges, which
would be to end 0.5 nats above the checkpoint; without liars the defences cost at most 0.005 nats,
and 3% of the time of a round (lies/time_of.py).
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

import torch

from bench.lies import findings
from bench.lies.arms import ARMS, HostileArm
from bench.lies.run import HostileResult, train_hostile_arm
from bench.lies.settings import BASES, HOSTILE, SMOKE_HOSTILE
from bench.lies.time_of import time_of_defences
from bench.quality.checkpoints import Checkpoints
from bench.quality.store import Store
from bench.quality.study import Study, study_options
from bench.quality.world import World
from bench.report import Report

RESULTS: Final = Path(__file__).parent / "results" / "hostile.jsonl"


def main() -> None:
    arguments = study_options(__doc__, ARMS, RESULTS).parse_args()
    torch.set_num_threads(1)  # the matrices are small
    setting = SMOKE_HOSTILE if arguments.smoke else HOSTILE
    store = Store(arguments.results, setting, HostileResult)
    checkpoints = Checkpoints(BASES[setting.name], arguments.cache)
    study = Study(store, arguments.cache, partial(_train, checkpoints))
    names = arguments.arms or [arm.name for arm in ARMS.values() if arguments.full or arm.is_main]
    seeds = arguments.seeds if arguments.full else arguments.seeds[:1]
    runs: dict[str, dict[int, HostileResult]] = {name: {} for name in names}
    for seed in seeds:
        chosen = [ARMS[name] for name in names]
        if seed != seeds[0]:
            chosen = [arm for arm in chosen if arm.defence == "on"]
        for name, found in study.gather(chosen, [seed], made_only=arguments.made_only).items():
            runs[name] |= found
    report = Report("hostile", f"What lies cost, {setting.name}")
    report.settings = asdict(setting)
    report.rows = findings.rows(runs)
    report.goals = findings.goals(runs, None if arguments.smoke else time_of_defences())
    report.notes = findings.notes(runs)
    report.publish(arguments.json)


def _train(checkpoints: Checkpoints, world: World, arm: HostileArm) -> HostileResult:
    return train_hostile_arm(world, arm, checkpoints.of_seed(world.spec.seed))


if __name__ == "__main__":
    main()
