"""Pictures for users: what the learning study found, against wall-clock time and against bytes.

The losses are those that bench/noloco_quality.py measured. The seconds are counted: STEP_S of
computing for each inner step, and for each average what bench/latency_model.py counts on a link,
during which nothing is trained: halving-doubling for averages of all, one exchange for pairs. So a
picture shows what a way of averaging costs on a link, for the model and the machine of the study.

    python -m bench.pictures [--results FILE] [--out docs/pictures/learning.png]
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import matplotlib as mpl

from bench.latency_model import Transfer
from bench.noloco_quality import RESULTS
from bench.quality.arms import ARMS
from bench.quality.run import Result
from bench.quality.settings import SHORT
from bench.quality.store import Store

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

STEP_S: Final = 0.1
FP32_BYTES: Final = 4
LINKS: Final = {
    "100 Mbit/s, 50 ms": (12.5e6, 0.05),
    "1 Gbit/s, 10 ms": (125e6, 0.01),
}
COLOURS: Final = {
    "ddp": "#7f7f7f",
    "diloco": "#1f77b4",
    "plain": "#2ca02c",
    "int8": "#9467bd",
    "none": "#d62728",
}
LABELS: Final = {
    "ddp": "gradients of all, every step (fp32)",
    "diloco": "DiLoCo: weights of all, every H steps (fp32)",
    "plain": "pairs, plain averaging (fp32)",
    "int8": "NoLoCo: pairs (int8)",
    "none": "no averaging",
}
SHOWN_S: Final = (2.0, 300.0)


@dataclass(frozen=True, slots=True)
class Curve:
    """One run.

    Attributes:
        points: inner steps done, loss in nats per token.
        bytes_per_step: sent by one peer, on average over a round.
    """

    arm: str
    replicas: int
    parameters: int
    inner_steps: int
    steps: int
    points: Sequence[tuple[int, float]]
    bytes_per_step: float

    @classmethod
    def of(cls, result: Result) -> "Curve":
        """The curve of a result of the study."""
        arm, setting = result.arm, result.setting
        inner_steps = max(1, round(arm["rounds_of"] * setting["inner_steps"]))
        return cls(
            arm=arm["name"],
            replicas=setting["replicas"],
            parameters=result.parameters,
            inner_steps=1 if arm["group"] == "gradients" else inner_steps,
            steps=setting["steps"],
            points=[(step, loss) for step, loss, _ in result.curve],
            bytes_per_step=result.bytes_per_parameter * result.parameters / setting["steps"],
        )

    def seconds_per_step(self, bytes_per_s: float, latency_s: float) -> float:
        """Seconds of one inner step with its share of an average."""
        if not self.bytes_per_step:
            return STEP_S
        if self.arm in ("ddp", "diloco"):
            size = float(FP32_BYTES * self.parameters)
            average_s = Transfer(self.replicas, size, latency_s, bytes_per_s).halving_doubling_s()
        else:
            size = self.bytes_per_step * self.inner_steps
            average_s = Transfer(2, size, latency_s, bytes_per_s).pair_s()
        return STEP_S + average_s / self.inner_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/learning.png"))
    arguments = parser.parse_args()
    store = Store(arguments.results, SHORT, Result)
    found = [store.load(ARMS[arm], 0) for arm in COLOURS]
    draw([Curve.of(result) for result in found if result is not None], arguments.out)


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Three panels: seconds on two links, then bytes."""
    figure, panels = plt.subplots(1, 3, figsize=(13.0, 4.6), dpi=110, sharey=True)
    for axes, (name, link) in zip(panels[:2], LINKS.items(), strict=True):
        for curve in curves:
            step_s = curve.seconds_per_step(*link)
            _plot(axes, curve, [step * step_s for step, _ in curve.points])
        axes.set(title=name, xlabel="seconds (counted)", xscale="log", xlim=SHOWN_S)
    for curve in curves:
        if curve.bytes_per_step:
            _plot(panels[2], curve, [step * curve.bytes_per_step / 1e6 for step, _ in curve.points])
    panels[2].set(title="bytes", xlabel="MB sent by each peer", xscale="log")
    panels[0].set(ylabel="validation loss, nats per byte")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(path)
    plt.close(figure)


def _plot(axes: Axes, curve: Curve, at: Sequence[float]) -> None:
    losses = [loss for _, loss in curve.points]
    axes.plot(at, losses, color=COLOURS[curve.arm], label=LABELS[curve.arm], marker=".")
    axes.grid(visible=True, alpha=0.3)


if __name__ == "__main__":
    main()
