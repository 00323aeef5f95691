"""From runs of the study to a table and goals. Costs are differences of equal seeds."""

import math
from collections.abc import Mapping
from typing import Final

from bench.quality.measures import mean, standard_error
from bench.quality.runs import paired
from bench.report import Goal, Row

from .arms import ARMS, NONE, PEERS, SHARES, HostileArm, Way
from .run import HostileResult
from .time_of import DefenceTime

Runs = Mapping[str, Mapping[int, HostileResult]]
"""Arm to seed to result."""

TOLERATED_NATS: Final = 0.02
"""Cost of an attack by the smaller share of liars."""
DIVERGED_NATS: Final = 0.5
"""Above the checkpoint: then training has not only stood still."""
DEFENCE_NATS: Final = 0.005
DEFENCE_TIME: Final = 0.03
WAYS: Final[tuple[Way, ...]] = ("pairs", "fragments")


def rows(runs: Runs) -> list[Row]:
    """One row per arm, in the order of the study."""
    return [_row(arm, runs) for arm in ARMS.values() if runs.get(arm.name)]


def _row(arm: HostileArm, runs: Runs) -> Row:
    found = list(runs[arm.name].values())
    costs = costs_of(arm, runs)
    return {
        "way": arm.way,
        "attack": "none, unequal" if arm.slow else arm.attack,
        "liars": f"{arm.liars} of {PEERS - arm.absent}",
        "defences": "audits" if arm.audited else "trim" if arm.trims else arm.defence,
        "seeds": len(found),
        "loss": nats(mean([result.loss for result in found])),
        "costs": nats(mean(costs), signed=True) if costs else None,
        "s.e.": standard_error(costs) if costs and all(map(math.isfinite, costs)) else None,
        "lost": _percent([result.lost_share for result in found]),
        "liars'": _percent([result.liars_share for result in found]),
        "clipped": _percent([result.clipped_share for result in found]),
    }


def costs_of(arm: HostileArm, runs: Runs) -> list[float]:
    """The cost of each seed against the same honest peers alone; empty for these themselves."""
    return [] if arm.name == arm.reference else paired(arm.name, runs, arm.reference)


def nats(value: float, *, signed: bool = False) -> str:
    """A loss, or a word where it is none."""
    if not math.isfinite(value):
        return "no number"
    return f"{value:+.4f}" if signed else f"{value:.4f}"


def _percent(values: list[float]) -> str:
    return f"{mean(values):.1%}"


def goals(runs: Runs, times: Mapping[Way, DefenceTime] | None) -> list[Goal]:
    """The goals, as far as their arms were run and times were taken."""
    made = []
    for way in WAYS:
        made += [*_attack_goals(way, runs), *_divergence_goals(way, runs), *_free_goals(way, runs)]
        if times:
            what = f"{way}: time of the defences, of an exchange"
            made.append(Goal(what, times[way].share, at_most=DEFENCE_TIME))
    return made


def _defended(way: Way, liars: int, runs: Runs) -> list[HostileArm]:
    return [
        arm
        for arm in ARMS.values()
        if (arm.way, arm.liars, arm.defence) == (way, liars, "on")
        and arm.attack != NONE
        and not arm.trims
        and arm.audited is arm.is_of_owners  # as the daemon does
        and costs_of(arm, runs)
    ]


def _attack_goals(way: Way, runs: Runs) -> list[Goal]:
    """What the worst attack of few liars costs, contributors' and owners' by themselves."""
    few, made = SHARES[0], []
    for power in (False, True):
        arms = [arm for arm in _defended(way, few, runs) if arm.is_of_owners is power]
        if arms:
            worst = max(arms, key=lambda arm: mean(costs_of(arm, runs)))
            costs = costs_of(worst, runs)
            error = standard_error(costs)
            scatter = f" (s.e. {error:.4f})" if error is not None else ", one seed"
            who = "owners" if power else "liars"
            what = f"{way}, {few} {who}: cost of the worst attack, {worst.attack}{scatter}"
            made.append(Goal(what, mean(costs), at_most=TOLERATED_NATS))
    return made


def _divergence_goals(way: Way, runs: Runs) -> list[Goal]:
    """How far above the checkpoint the worst attack of many liars ends."""
    many, made = SHARES[1], []
    for power in (False, True):
        risen = {
            arm.attack: max(each.loss - each.start_loss for each in runs[arm.name].values())
            for arm in _defended(way, many, runs)
            if arm.is_of_owners is power
        }
        if risen:
            worst = max(risen, key=lambda attack: risen[attack])
            who = "owners" if power else "liars"
            what = f"{way}, {many} {who}: loss less the checkpoint's, worst, {worst}"
            made.append(Goal(what, risen[worst], at_most=DIVERGED_NATS))
    return made


def _free_goals(way: Way, runs: Runs) -> list[Goal]:
    """What the defences cost where nobody lies."""
    made = []
    for kind, peers in ((NONE, "no liars"), ("unequal", "no liars, unequal peers")):
        name = f"{way}-{kind}-{PEERS}"
        if costs := paired(name, runs, f"{name}-off"):
            what = f"{way}, {peers}: cost of the defences"
            made.append(Goal(what, mean(costs), at_most=DEFENCE_NATS))
    return made


def notes(runs: Runs) -> list[str]:
    """Sentences on what the figures stand on."""
    starts = {
        seed: result.start_loss for of_seed in runs.values() for seed, result in of_seed.items()
    }
    seeds = [f"seed {seed}: {loss:.4f}" for seed, loss in sorted(starts.items())]
    return [f"loss of the checkpoint: {', '.join(seeds)}"] if seeds else []
