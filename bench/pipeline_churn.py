"""Goodput of a pipeline whose relays are killed: ours, dropping, and waiting for the replacement.

Virtual time; the cores are the real ones (protocol/microbatch), links and trainers only take their
time (bench/churn/world.py). Goodput of a stage: token-gradients that moved its weights, over those
that were begun; the worst stage counts. "Of those without kills" is what moved the worst stage,
over the same where nobody is killed; "longest" the longest time from a microbatch's beginning to
its end. With long iterations, what a relay had added since its last step weighs more.

Agora's policy is reimplemented from what is published: it finds another way forward, and drops what
meets a dead hop on its way back. Waiting: each data peer has one relay of each stage, and waits for
it. A relay comes back after 30 s, is noticed to be gone after 2 s, and steps with what it has added
each iteration; what it had added since its last step is gone with it in every policy.

    python -m bench.pipeline_churn [--full] [--json FILE]
"""

from dataclasses import replace
from statistics import fmean
from typing import Final

from bench.churn.policies import POLICIES
from bench.churn.setting import Setting
from bench.churn.world import ChurnWorld
from bench.report import Goal, Report, options

SHORT: Final = Setting(hop_s=0.05, latency_s=0.02, forward_s=0.03, backward_s=0.06)
LONG: Final = Setting()
CASES: Final = ((SHORT, 15.0), (LONG, 60.0), (LONG, 15.0))
SEEDS: Final = (0,)
FULL_SEEDS: Final = (0, 1, 2)
GOODPUT: Final = 0.95
QUIET_S: Final = 1e9
HANGS_S: Final = 120.0
"""Far below the patience: nothing was waited for in vain."""


def main() -> None:
    arguments = options(__doc__).parse_args()
    seeds = FULL_SEEDS if arguments.full else SEEDS
    report = Report("pipeline_churn", "Relays are killed again and again", {"seeds": len(seeds)})
    for setting, every_s in CASES:
        quiet = ChurnWorld(replace(setting, every_s=QUIET_S), POLICIES[0], 0)
        quiet.run()
        iteration_s = setting.seconds / quiet.iterations
        for policy in POLICIES:
            worlds = [ChurnWorld(replace(setting, every_s=every_s), policy, n) for n in seeds]
            name = f"iterations of {iteration_s:.1f} s, a kill every {every_s:g} s"
            measure(report, name, worlds, whole_of(quiet))
    report.publish(arguments.json)


def whole_of(world: ChurnWorld) -> float:
    """Microbatches that moved the stage that they moved least."""
    return min(world.goodput()) * len(world.begun)


def measure(report: Report, name: str, worlds: list[ChurnWorld], undisturbed: float) -> None:
    """One policy, over all seeds."""
    for world in worlds:
        world.run()
    worst = fmean(min(world.goodput()) for world in worlds)
    twice = sum(world.twice for world in worlds)
    longest_s = max(world.hung_s for world in worlds)
    report.rows.append(
        {
            "setting": name,
            "policy": worlds[0].policy.name,
            "kills": fmean(world.kills for world in worlds),
            "begun": fmean(len(world.begun) for world in worlds),
            "goodput, worst stage": worst,
            "of those without kills": fmean(map(whole_of, worlds)) / undisturbed,
            "twice": twice,
            "longest, s": longest_s,
        }
    )
    if worlds[0].policy is POLICIES[0]:
        report.goals.append(Goal(f"{name}: counted twice", twice, at_most=0))
        report.goals.append(Goal(f"{name}: longest, s", longest_s, at_most=HANGS_S))
        if worlds[0].setting.forward_s == SHORT.forward_s:
            report.goals.append(Goal(f"{name}: goodput", worst, at_least=GOODPUT))


if __name__ == "__main__":
    main()
