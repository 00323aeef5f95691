"""A picture of compute utilisation against bandwidth: the paper's methods, ours, the paper's table.

Lines are simulated (bench/bandwidth), dots are table 4 of Streaming DiLoCo: the last point of its
grid below the level, so a dot lies up to one point (20.7%) left of its line. The star is what
INTELLECT-1 reports for its widest swarm, at the bandwidth that its seconds imply; its steps take
far longer than the table's, so it lies on none of the lines.

    python -m bench.utilisation_picture [--out docs/pictures/utilisation.png]
"""

import argparse
from pathlib import Path
from typing import Final

import matplotlib as mpl

from bench.bandwidth.intellect1 import PARAMETERS, WIDEST
from bench.bandwidth.methods import (
    DATA_PARALLEL,
    DILOCO,
    MODELS,
    NOLOCO,
    OUR_STREAMING_4_BIT,
    OUR_STREAMING_INT8,
    OVERLAPPED,
    OVERLAPPED_FP4,
    STREAMING,
    Reading,
    our_curves,
    paper_curves,
)
from bench.bandwidth.simulator import Model
from bench.bandwidth.table import FINE_GBIT_S, LEVELS, PAPER_GBIT_S

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

PEERS: Final = 2
"""Number of peers, as in the paper's table."""
COLOURS: Final = {
    DATA_PARALLEL: "#7f7f7f",
    DILOCO: "#1f77b4",
    STREAMING: "#17becf",
    OVERLAPPED: "#2ca02c",
    OVERLAPPED_FP4: "#ff7f0e",
    NOLOCO: "#9467bd",
    OUR_STREAMING_INT8: "#d62728",
    OUR_STREAMING_4_BIT: "#8c564b",
}
LABELS: Final = {
    DATA_PARALLEL: "data-parallel (bf16)",
    DILOCO: "DiLoCo (bf16)",
    STREAMING: "streaming DiLoCo (bf16)",
    OVERLAPPED: "streaming, overlap (bf16)",
    OVERLAPPED_FP4: "streaming, overlap, FP4",
    NOLOCO: "ours: NoLoCo, int8, rounds kept",
    OUR_STREAMING_INT8: "ours: streaming, overlap, int8",
    OUR_STREAMING_4_BIT: "ours: streaming, overlap, 4 bit",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/utilisation.png"))
    draw(parser.parse_args().out)


def draw(path: Path) -> None:
    """One panel for each model."""
    figure, panels = plt.subplots(1, len(MODELS), figsize=(13.0, 4.8), dpi=110, sharey=True)
    for axes, model in zip(panels, MODELS, strict=True):
        _draw_model(axes, model)
    panels[0].set(ylabel="compute utilisation", ylim=(0.0, 1.02))
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    figure.savefig(path)
    plt.close(figure)


def _draw_model(axes: Axes, model: Model) -> None:
    ours = our_curves(model, PEERS, delay_steps=1)
    curves = paper_curves(model, Reading()) | {
        name: ours[name] for name in (NOLOCO, OUR_STREAMING_INT8, OUR_STREAMING_4_BIT)
    }
    for name, curve in curves.items():
        style = "-" if name in PAPER_GBIT_S else "--"
        axes.plot(
            FINE_GBIT_S, curve(FINE_GBIT_S), style, color=COLOURS[name], label=LABELS[name], lw=1.6
        )
    for name, of_models in PAPER_GBIT_S.items():
        axes.plot(of_models[model.name], LEVELS, ".", color=COLOURS[name], ms=7)
    if model.parameters == PARAMETERS:
        label = "INTELLECT-1: 469 s of all-reduce, 22.8 s per step"
        axes.plot([WIDEST.link_gbit_s], [WIDEST.reported], "k*", ms=13, label=label)
    axes.set(
        title=f"{model.name}, {model.layers} layers, {model.step_s:g} s per step",
        xlabel="Gbit/s between sites, each way",
        xscale="log",
        xlim=(FINE_GBIT_S[0], FINE_GBIT_S[-1]),
    )
    axes.grid(visible=True, alpha=0.3)


if __name__ == "__main__":
    main()
