"""The losses of the study, against steps and against simulated hours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import matplotlib as mpl

from .arms import FULL, SAME_CLOCK, SKIP, SMALL
from .run import StageResult

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

SECONDS_PER_HOUR: Final = 3600
LABELS: Final = {
    FULL: "all six stages",
    SAME_CLOCK: "all six stages, for as long as skipping takes",
    SKIP: "four of six stages",
    SMALL: "a model of four stages",
    "late": "four of six, gradients one update late",
    "cc1": "four of six, stage 0 skipped too",
}
LEFT_OUT: Final = {FULL: "trained with all six", SKIP: "trained with four of six"}
Runs = Mapping[str, Mapping[int, StageResult]]


def draw(runs: Runs, path: Path) -> None:
    """Three panels: steps, hours, and stages left out; seed 0."""
    figure, (steps, hours, left_out) = plt.subplots(1, 3, figsize=(13.0, 4.6), dpi=110)
    for name, label in LABELS.items():
        result = runs.get(name, {}).get(0)
        if result is None:
            continue
        if name != SAME_CLOCK:
            _plot(steps, result, label, 1)
        if result.iteration_s is not None and name != FULL:
            _plot(hours, result, label, result.iteration_s / SECONDS_PER_HOUR)
    steps.set(xlabel="steps", ylabel="held-out loss with all stages, nats per byte")
    hours.set(xlabel="hours on 20 simulated machines")
    _plot_left_out(left_out, runs)
    for axes in (steps, hours, left_out):
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _plot(axes: Axes, result: StageResult, label: str, unit: float) -> None:
    """The losses over the steps, each so many units; the first point would hide the others."""
    points = result.curve[1:]
    axes.plot(
        [step * unit for step, _, _ in points],
        [loss for *_, loss in points],
        color=f"C{list(LABELS.values()).index(label)}",
        label=label,
        marker=".",
    )


def _plot_left_out(axes: Axes, runs: Runs) -> None:
    for name, label in LEFT_OUT.items():
        result = runs.get(name, {}).get(0)
        if result is None:
            continue
        for number, losses in result.left_out.items():
            axes.scatter([int(number)] * len(losses), losses, s=12, alpha=0.4,
                         color=f"C{list(LABELS).index(name)}")  # fmt: skip
        means = [sum(losses) / len(losses) for losses in result.left_out.values()]
        axes.plot(list(map(int, result.left_out)), means, label=label,
                  color=f"C{list(LABELS).index(name)}")  # fmt: skip
    axes.set(xlabel="stages of six at inference", ylabel="held-out loss, nats per byte")
