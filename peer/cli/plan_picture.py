"""`loco-peer plan --picture`: the timeline of the planned pipelines.

A row is a machine, the stages from top to bottom; the full pipeline stands above SkipPipe on the
same axis of time. A colour is a data peer: its microbatches are pale forward, dark backward, black
for the loss. A thin line leads from the end of a piece of work to the beginning of the next one of
the same microbatch: a long line is a long way or a long wait.

Only the extra `plot` brings matplotlib, so it is imported only if a picture is asked for.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from peer.options.config import ConfigError
from protocol.pipeline.pipelines import PricedIteration
from protocol.pipeline.problem import US_PER_S
from protocol.pipeline.simulator import BACKWARD, FORWARD, LATER, LOSS, BusyInterval
from protocol.pipeline.what_if import WhatIfAnswer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXTRA: Final = "pip install 'loco-peer[plot]'"
ENDINGS: Final = (".png", ".svg")
OPACITY: Final = {FORWARD: 0.45, BACKWARD: 1.0, LATER: 0.25, LOSS: 1.0}
KINDS: Final = {
    FORWARD: "forward", LOSS: "loss", BACKWARD: "backward", LATER: "gradient of weights"
}  # fmt: skip
LOSS_COLOUR: Final = "#111111"
MOST_NAMED: Final = 80
"""Rows that still have room for a name each."""


def check_picture(path: Path) -> None:
    """Raises ConfigError: the picture cannot be drawn later."""
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(f"--picture {path}: must end in {' or '.join(ENDINGS)}")
    try:
        import matplotlib.figure as _figure  # noqa: F401 - is it here?
    except ImportError as error:
        raise ConfigError(f"--picture needs matplotlib: {EXTRA}, or leave --picture out") from error
    was_there = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    if not was_there:
        with suppress(OSError):
            path.unlink()


def draw(answer: WhatIfAnswer, path: Path) -> None:
    """Raises ConfigError: the file cannot be written."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shown = _shown(answer)
    rows = min(MOST_NAMED, len(answer.skippipe.problem.peers))
    height = len(shown) * (0.9 + 0.27 * rows)  # inches
    end_s = max(each.planned.makespan_us for _, each in shown) / US_PER_S
    with mpl.rc_context({"svg.hashsalt": "loco-peer", "font.size": 9}):
        figure = Figure(figsize=(12.0, max(3.0, height)), dpi=120, layout="constrained")
        grid = figure.subplots(len(shown), 1, sharex=True, squeeze=False)
        for (title, iteration), axes in zip(shown, grid[:, 0], strict=True):
            _draw_iteration(axes, title, iteration, end_s)
        grid[-1, 0].set_xlabel("seconds")
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _shown(answer: WhatIfAnswer) -> list[tuple[str, PricedIteration]]:
    usual, *unskipped = answer.skippipe.iterations
    shown = [("SkipPipe", usual), *(("SkipPipe, nothing skipped", each) for each in unskipped)]
    if answer.full is answer.skippipe:
        return [("full pipeline", usual)]
    return [("full pipeline", answer.full.iterations[0]), *shown]


def _draw_iteration(axes: "Axes", title: str, iteration: PricedIteration, end_s: float) -> None:
    plan, peers = iteration.planned.plan, iteration.problem.peers
    order = sorted(range(len(peers)), key=lambda m: (plan.stages[m], m))
    rows = {machine: row for row, machine in enumerate(order)}
    origins = [job.origin for job in iteration.jobs]
    data_peers = sorted(set(origins), key=lambda m: rows[m])
    colours = {m: f"C{i % 10}" for i, m in enumerate(data_peers)}  # matplotlib's own cycle
    _draw_work(axes, iteration.record, rows, [colours[origin] for origin in origins])
    _draw_ways(axes, iteration.record, rows, [colours[origin] for origin in origins])
    _draw_stages(axes, [plan.stages[machine] for machine in order])
    seconds = iteration.planned.makespan_us / US_PER_S
    axes.axvline(seconds, color="black", linewidth=0.8, linestyle=":")
    axes.set_title(f"{title}: {seconds:.2f} s", loc="left", fontweight="bold")
    axes.set_xlim(0, end_s * 1.01)
    axes.set_ylim(len(order) - 0.4, -0.6)
    _name_rows(axes, [(peers[m].name, plan.stages[m], colours.get(m)) for m in order])
    _explain(axes, {interval.kind for interval in iteration.record})
    axes.grid(axis="x", alpha=0.25, linewidth=0.5)
    axes.set_axisbelow(True)


def _draw_work(
    axes: "Axes", record: Sequence[BusyInterval], rows: dict[int, int], colours: Sequence[str]
) -> None:
    for machine, row in rows.items():
        own = [interval for interval in record if interval.machine == machine]
        if own:
            spans = [(s.start_us / US_PER_S, (s.end_us - s.start_us) / US_PER_S) for s in own]
            axes.broken_barh(
                spans,
                (row - 0.38, 0.76),
                facecolors=[_shade(interval.kind, colours[interval.job]) for interval in own],
                edgecolors="white",
                linewidth=0.3,
            )


def _shade(kind: int, colour: str) -> tuple[float, float, float]:
    """The colour, mixed with white: lines must not shine through."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(LOSS_COLOUR if kind == LOSS else colour)
    strong, white = OPACITY[kind], 1 - OPACITY[kind]
    return white + strong * red, white + strong * green, white + strong * blue


def _draw_ways(
    axes: "Axes", record: Sequence[BusyInterval], rows: dict[int, int], colours: Sequence[str]
) -> None:
    from matplotlib.collections import LineCollection

    chains: dict[int, list[BusyInterval]] = {}
    for interval in sorted(record, key=lambda s: s.start_us):
        if interval.kind != LATER:
            chains.setdefault(interval.job, []).append(interval)
    ways = [
        (one, then)
        for chain in chains.values()
        for one, then in pairwise(chain)
        if one.machine != then.machine
    ]
    lines = [
        [(a.end_us / US_PER_S, rows[a.machine]), (b.start_us / US_PER_S, rows[b.machine])]
        for a, b in ways
    ]
    axes.add_collection(
        LineCollection(
            lines, colors=[colours[a.job] for a, _ in ways], linewidths=0.5, alpha=0.55, zorder=0.5
        )
    )


def _draw_stages(axes: "Axes", stages: Sequence[int]) -> None:
    for row, (one, other) in enumerate(pairwise(stages)):
        if one != other:
            axes.axhline(row + 0.5, color="#888888", linewidth=0.6)


def _name_rows(axes: "Axes", named: Sequence[tuple[str, int, str | None]]) -> None:
    """Names where there is room, in a data peer's colour; else the stages alone."""
    if len(named) <= MOST_NAMED:
        axes.set_yticks(range(len(named)), [f"{name}  stage {stage}" for name, stage, _ in named])
        for label, (_, _, colour) in zip(axes.get_yticklabels(), named, strict=True):
            label.set_color(colour or "black")
        return
    stages = [stage for _, stage, _ in named]
    middles = {stage: stages.index(stage) + (stages.count(stage) - 1) / 2 for stage in stages}
    axes.set_yticks(list(middles.values()), [f"stage {stage}" for stage in middles])


def _explain(axes: "Axes", present: Collection[int]) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=_shade(kind, "#555555"), label=words)
        for kind, words in KINDS.items()
        if kind in present
    ]
    axes.legend(
        handles=patches,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(patches),
        frameon=False,
    )
