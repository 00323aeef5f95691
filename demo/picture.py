"""The picture of the losses."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes

from .reading import Point

mpl.use("Agg")

from matplotlib import pyplot as plt

PEER_COLOURS: Final = ("#1f77b4", "#2ca02c", "#9467bd", "#17becf")
LONE_COLOUR: Final = "#d62728"
SHOWN_NATS: Final = 0.9
"""The axis ends so much above the best loss: the first steps would flatten the rest."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One peer's losses, in nats per byte."""

    name: str
    training: Sequence[Point]
    validation: Sequence[Point]


def draw(peers: Sequence[Curve], alone: Curve, path: Path) -> None:
    """Draw training losses (thin) and validation losses (thick) over inner steps."""
    figure, axes = plt.subplots(figsize=(8.0, 4.5), dpi=120)
    for position, curve in enumerate(peers):
        _draw(axes, curve, PEER_COLOURS[position % len(PEER_COLOURS)])
    _draw(axes, alone, LONE_COLOUR)
    best = min((point.loss for curve in [*peers, alone] for point in curve.validation), default=0.0)
    axes.set_ylim(best - 0.15, best + SHOWN_NATS)
    axes.set_xlabel("inner steps of each peer")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title("Four peers that average, and one alone with as many steps")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _draw(axes: Axes, curve: Curve, colour: str) -> None:
    def steps(points: Sequence[Point]) -> list[float]:
        return [point.step for point in points]

    losses = [point.loss for point in curve.training]
    axes.plot(steps(curve.training), losses, color=colour, linewidth=0.6, alpha=0.35)
    label = f"{curve.name}, validation"
    if curve.validation:
        label += f" (end: {curve.validation[-1].loss:.3f})"
    losses = [point.loss for point in curve.validation]
    axes.plot(steps(curve.validation), losses, color=colour, linewidth=1.8, label=label)
