"""From runs to a table and goals. Differences are paired: of equal seeds, whose data are equal."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from bench.report import Goal, Row

from .arms import CODE_ARMS, REFERENCE
from .measures import mean, pearson, standard_error
from .run import Result
from .runs import paired

Runs = Mapping[str, Mapping[int, Result]]
"""Arm to seed to result."""

CODE_LIMIT: Final = 0.001
"""Share of the loss that a code may cost, where seeds do not scatter more."""
TOLERATED_PERPLEXITY: Final = 1.02
FAR_BETTER: Final = 1.05
"""Ratio of perplexities that counts as much better."""


def rows(runs: Runs) -> list[Row]:
    """One row per arm, in the order in which they were asked for."""
    return [_row(name, runs) for name in runs if runs[name]]


def _row(name: str, runs: Runs) -> Row:
    found = list(runs[name].values())
    losses = [result.loss for result in found]
    differences = paired(name, runs, REFERENCE)
    last = [result.deviations[-1] for result in found if result.deviations]
    return {
        "arm": name,
        "seeds": len(found),
        "loss": f"{mean(losses):.4f}",
        "ppl": round(math.exp(mean(losses)), 3),
        "loss of mean": f"{mean([result.averaged_loss for result in found]):.4f}",
        f"to {REFERENCE}": f"{mean(differences):+.5f}" if differences else None,
        "s.e.": rounded(standard_error(differences) if differences else None, 5),
        "deviation": _scientific([deviation[2] for deviation in last]),
        "pearson": _smallest([correlation(result) for result in found]),
        "B/param": round(mean([result.bytes_per_parameter for result in found]), 1),
        "resent": mean([result.resent_share for result in found]),
    }


def rounded(value: float | None, digits: int) -> float | None:
    """The number rounded for a table; None stays None."""
    return None if value is None else round(value, digits)


def _scientific(values: Sequence[float]) -> str:
    return f"{mean(values):.2e}" if values else "-"


def _smallest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(min(known), 3) if known else None


def correlation(result: Result) -> float | None:
    """Pearson of the slow weights' deviation with the learning rate, after warm-up.

    None where a group of all keeps them equal but for rounding.
    """
    if result.arm.get("group") == "all":
        return None
    warmup = int(result.setting["warmup_steps"])
    after = [point for point in result.deviations if point[0] > warmup]
    return pearson([rate for _, rate, _, _ in after], [slow for _, _, slow, _ in after])


LADDER: Final = (
    ("plain-all-h1", "AdamW on own gradients, weights averaged in each step"),
    ("plain-all", "averaged every H steps"),
    ("plain", "in pairs"),
    (REFERENCE, "with outer momentum"),
)
"""From ddp down to noloco, one change at a time."""


def explanation(runs: Runs) -> list[str]:
    """What each change between ddp and noloco costs; rungs that were not run are passed over."""
    lines, before = [], "ddp"
    for name, change in LADDER:
        if not (costs := paired(name, runs, before)):
            continue
        lines.append(f"{before} to {name}, {change}: {mean(costs):+.4f} nats")
        before = name
    return lines


def goals(runs: Runs) -> list[Goal]:
    """Goals of the paper and of the codes, as far as their arms were run."""
    return [*_order_goals(runs), *_swarm_goals(runs), *code_goals(runs)]


def _order_goals(runs: Runs) -> list[Goal]:
    made = []
    if gains := paired("ddp", runs, REFERENCE):
        made.append(Goal("loss of ddp less that of noloco", mean(gains), at_most=0.0))
    for other in ("diloco", "diloco-2h"):
        if differences := paired(other, runs, REFERENCE):
            ratio = math.exp(-mean(differences))
            what = f"perplexity of noloco over that of {other}"
            made.append(Goal(what, ratio, at_most=TOLERATED_PERPLEXITY))
    if differences := paired("none", runs, REFERENCE):
        what = "perplexity of no averaging over that of noloco"
        made.append(Goal(what, math.exp(mean(differences)), at_least=FAR_BETTER))
    return made


def _swarm_goals(runs: Runs) -> list[Goal]:
    made = []
    averaging = [
        result
        for of_seed in runs.values()
        for result in of_seed.values()
        if result.arm["group"] == "pairs"
    ]
    if averaging:
        worst = max(result.averaged_loss - result.loss for result in averaging)
        made.append(Goal("loss of the mean weights less the replicas', worst", worst, at_most=0.0))
    correlations = [correlation(result) for result in runs.get(REFERENCE, {}).values()]
    known = [value for value in correlations if value is not None]
    if known:
        made.append(Goal("Pearson, deviation with rate, noloco, worst", min(known), at_least=0.9))
    return made


def code_goals(runs: Runs) -> list[Goal]:
    """What a code costs against fp32: at most 0.1% of the loss, or two standard errors."""
    made = []
    for name in CODE_ARMS:
        differences = paired(name, runs, REFERENCE)
        if name == REFERENCE or not differences:
            continue
        loss = mean([result.loss for result in runs[REFERENCE].values()])
        limit = max(CODE_LIMIT * loss, 2 * (standard_error(differences) or 0.0))
        what = f"loss of {name} less that of fp32, paired"
        made.append(Goal(what, mean(differences), at_most=limit))
    return made
