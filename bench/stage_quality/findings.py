"""From runs over stages to a table, goals and notes. Differences are of equal seeds."""

import math
from collections.abc import Mapping

from bench.quality.measures import mean, standard_error
from bench.quality.runs import paired
from bench.report import Goal, Row

from .arms import ARMS, FULL, SAME_CLOCK, SKIP, SMALL, VIOLATIONS
from .run import StageResult
from .settings import STAGES

Runs = Mapping[str, Mapping[int, StageResult]]
"""Arm to seed to result."""


def rows(runs: Runs) -> list[Row]:
    """One row per arm, in the order of the study."""
    return [_row(name, runs) for name in ARMS if runs.get(name)]


def _row(name: str, runs: Runs) -> Row:
    found = list(runs[name].values())
    differences = paired(name, runs, SKIP)
    loss = mean([result.loss for result in found])
    clocks = [each.iteration_s * each.steps for each in found if each.iteration_s is not None]
    return {
        "arm": name,
        "seeds": len(found),
        "steps": found[0].steps,
        "loss": f"{loss:.4f}",
        "ppl": round(math.exp(loss), 3),
        f"to {SKIP}": f"{mean(differences):+.4f}" if differences else None,
        "s.e.": standard_error(differences) if differences else None,
        "clock, h": round(mean(clocks) / 3600, 2) if clocks else None,
        "5 of 6": _ratio_text(found, 5),
        "4 of 6": _ratio_text(found, 4),
        "3 of 6": _ratio_text(found, 3),
        "clipped": None
        if found[0].arm["global_clip"]
        else f"{mean([result.clipped_share for result in found]):.2f}",
    }


def perplexity_ratio(result: StageResult, visited: int) -> float | None:
    """Mean perplexity with so many stages over that with all; None where that was not measured."""
    of_visited = result.left_out.get(str(visited))
    stages = max(map(int, result.left_out), default=0)
    if not of_visited or visited > stages:
        return None
    whole = result.left_out[str(stages)][0]
    return mean([math.exp(loss - whole) for loss in of_visited])


def _ratio_text(found: list[StageResult], visited: int) -> str | None:
    ratios = _ratios(found, visited)
    return f"{mean(ratios):.3f}" if ratios and found[0].arm["stages"] == STAGES else None


def _ratios(found: list[StageResult], visited: int) -> list[float]:
    ratios = [perplexity_ratio(result, visited) for result in found]
    return [ratio for ratio in ratios if ratio is not None]


def goals(runs: Runs) -> list[Goal]:
    """The goals that bench/pipeline_learning.py states, held against these runs."""
    made = [
        *_difference(runs, SKIP, FULL, "after as many steps", at_most=0.02),
        *_difference(runs, SKIP, SAME_CLOCK, "in the same time", at_most=0.0),
        *_difference(runs, SKIP, SMALL, "with as much compute per token", at_most=0.0),
        *_difference(runs, "full-every-10", SKIP, at_most=0.0),
        *_difference(runs, "late", SKIP, at_most=0.02),
        *_difference(runs, "int8", SKIP, at_most=0.01),
        *_difference(runs, SKIP, "global-clip", at_least=-0.01, at_most=0.01),
    ]
    for name in VIOLATIONS:
        made += _difference(runs, name, SKIP, at_least=0.02)
    return [*made, *_left_out_goals(runs), *_column_goals(runs)]


def _difference(
    runs: Runs,
    name: str,
    reference: str,
    how: str = "",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> list[Goal]:
    differences = paired(name, runs, reference)
    if not differences:
        return []
    what = f"loss of {name} less that of {reference}{f', {how}' if how else ''}, nats"
    return [Goal(what, mean(differences), at_least, at_most)]


def _left_out_goals(runs: Runs) -> list[Goal]:
    made = []
    ours, theirs = (list(runs.get(name, {}).values()) for name in (SKIP, FULL))
    for visited, most in ((5, 1.02), (3, 1.07)):
        if ratios := _ratios(ours, visited):
            what = f"perplexity of {SKIP} with {visited} of 6 stages, over that with all"
            made.append(Goal(what, mean(ratios), at_most=most))
    if _ratios(ours, 3) and _ratios(theirs, 3):
        what = f"the same ratio with 3 of 6 stages, over {FULL}'s"
        both = mean(_ratios(ours, 3)) / mean(_ratios(theirs, 3))
        made.append(Goal(what, both, at_most=1.0))
    return made


def _column_goals(runs: Runs) -> list[Goal]:
    made = []
    if differences := paired("random-gossip", runs, "columns-gossip"):
        ratio = math.exp(mean(differences))
        made.append(Goal("perplexity of random-gossip over columns-gossip", ratio, at_most=1.04))
    apart = [
        runs["random-apart"][seed].deviations[-1][1] / result.deviations[-1][1]
        for seed, result in runs.get("columns-apart", {}).items()
        if seed in runs.get("random-apart", {})
    ]
    if apart:
        what = "replicas of random-apart from each other, over columns-apart's"
        made.append(Goal(what, mean(apart), at_most=0.9))
    return made


def notes(runs: Runs) -> list[str]:
    """Sentences on gradients of stages, and on replicas."""
    lines = []
    for name in (SKIP, FULL):
        for result in list(runs.get(name, {}).values())[:1]:
            norms = ", ".join(f"{norm:.3f}" for norm in result.norms)
            lines.append(f"{name}: mean gradient norms by stage {norms}")
    lines += [
        f"{name}: replicas of a stage {result.deviations[-1][1]:.5f} apart, seed {seed}"
        for name, of_seed in runs.items()
        for seed, result in of_seed.items()
        if result.deviations
    ]
    return lines
