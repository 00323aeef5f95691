"""The times of all planners in all settings, as bars.

One panel for each setting; longer than LONGEST times ours is cut off, with its time beside it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl

from bench.pipeline.comparison import OURS, OURS_FULL, Comparison
from bench.pipeline.rivals import RIVALS

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

LONGEST: Final = 5.0
COLUMNS: Final = 4
OUR_COLOUR: Final = "#d62728"
SKIPPING_COLOUR: Final = "#1f77b4"
FULL_COLOUR: Final = "#7f7f7f"


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write the picture."""
    rows = -(-len(comparisons) // COLUMNS)
    figure, grid = plt.subplots(
        rows, COLUMNS, figsize=(14.0, 3.1 * rows), dpi=110, squeeze=False, sharey=True
    )
    panels = grid.flat
    for axes, comparison in zip(panels, comparisons, strict=False):
        _panel(axes, comparison)
    for axes in list(grid.flat)[len(comparisons) :]:
        axes.axis("off")
    figure.suptitle(
        "An iteration, in seconds: red ours, blue rivals that skip, grey full pipelines"
    )
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _panel(axes: Axes, comparison: Comparison) -> None:
    ours = comparison.ours[0].seconds
    bars = [(OURS, ours, OUR_COLOUR)]
    bars += [
        (r.name, each.seconds, FULL_COLOUR if r.full_depth else SKIPPING_COLOUR)
        for r in RIVALS
        if (each := comparison.rivals.get(r.name))
    ]
    bars.append((OURS_FULL, comparison.ours_full.seconds, OUR_COLOUR))
    order = [OURS, *(r.name for r in RIVALS), OURS_FULL]
    for name, seconds, colour in bars:
        place, shown = len(order) - order.index(name), min(seconds, LONGEST * ours)
        axes.barh(place, shown, color=colour)
        axes.text(shown, place, f" {seconds:.1f}", va="center", fontsize=7)
    axes.axvline(comparison.bound_s, color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(1, len(order) + 1), labels=order[::-1], fontsize=8)
    axes.set(title=comparison.setting.name, xlim=(0, (LONGEST + 1) * ours))
