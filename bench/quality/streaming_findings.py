"""From runs of streaming DiLoCo to a table and goals. Differences are of equal seeds."""

import math
from collections.abc import Mapping
from typing import Final

from bench.report import Goal, Row

from .measures import mean, standard_error
from .runs import paired
from .streaming import StreamingResult
from .streaming_arms import DEFAULT, PLAIN, PLAIN_H100, STREAMING_ARMS

Runs = Mapping[str, Mapping[int, StreamingResult]]
"""Arm to seed to result."""

TOLERATED_NATS: Final = 0.02
"""Distance at which the loss may lie from that of plain DiLoCo at equal H."""
REFERENCES: Final = {
    "h100": PLAIN_H100,
    **dict.fromkeys(
        (DEFAULT, "whole", "blocks-1", "tau-0", "tau-5", "tau-10", "merge-0", "fp32", "int4"), PLAIN
    ),
}
"""Each arm that promises the loss of plain DiLoCo, and which: of as many replicas and equal H."""


def rows(runs: Runs) -> list[Row]:
    """One row per arm, in the order of the study."""
    return [_row(name, runs) for name in STREAMING_ARMS if runs.get(name)]


def _row(name: str, runs: Runs) -> Row:
    found = list(runs[name].values())
    differences = paired(name, runs, PLAIN)
    loss = mean([result.loss for result in found])
    return {
        "arm": name,
        "seeds": len(found),
        "loss": f"{loss:.4f}",
        "ppl": round(math.exp(loss), 3),
        f"to {PLAIN}": f"{mean(differences):+.4f}" if differences else None,
        "s.e.": standard_error(differences) if differences else None,
        "to default": _signed(paired(name, runs, DEFAULT)),
        "fast less slow": f"{mean([result.fast_loss - result.loss for result in found]):+.4f}",
        "mean fast": f"{mean([result.mean_fast_loss for result in found]):.4f}",
        "MB sent": f"{mean([result.sent_megabytes for result in found]):.2f}",
        "MB at once": f"{mean([result.largest_send_megabytes for result in found]):.3f}",
    }


def _signed(differences: list[float]) -> str | None:
    return f"{mean(differences):+.4f}" if differences else None


def goals(runs: Runs) -> list[Goal]:
    """Every arm that promises it is near plain DiLoCo at equal H."""
    made = []
    for name, reference in REFERENCES.items():
        if differences := paired(name, runs, reference):
            what = f"loss of {name} less that of {reference}, nats"
            made.append(
                Goal(what, mean(differences), at_least=-TOLERATED_NATS, at_most=TOLERATED_NATS)
            )
    return made


def notes(runs: Runs) -> list[str]:
    """Sentences on how the model was cut."""
    lines = []
    for name in (DEFAULT, "blocks-1"):
        for result in list(runs.get(name, {}).values())[:1]:
            sizes = ", ".join(f"{size:,}" for size in result.fragment_parameters)
            lines.append(f"{name}: {len(result.fragment_parameters)} fragments of {sizes} values")
    return lines
