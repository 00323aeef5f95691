"""How much bandwidth keeps the processors busy: Streaming DiLoCo's simulator, and ours beside it.

Three tables (the simulator is in bandwidth/simulator.py, what is assumed in bandwidth/methods.py):

  paper        the paper's table 4: Gbit/s needed for a compute utilisation of 50 to 99%, five
               methods, three models; the points of its grid, and each over the paper's value
  ours         the same, unrounded, for the paper's methods and for this project's
  intellect1   a real swarm's averages, and NoLoCo's on the same links

With `--full`, ours for more peers and a longer overlap, and

  readings     what other choices for what the paper leaves open would give

Goals: no cell more than one point of the grid (20.7%) away; no two cells in another order than in
the paper; no two methods either, before rounding.

    python -m bench.utilisation [--full] [--json FILE]
"""

from collections.abc import Mapping, Sequence
from typing import Final

from bench.bandwidth.intellect1 import SITES
from bench.bandwidth.methods import (
    MODELS,
    NOLOCO,
    NOLOCO_WAITING,
    Curve,
    Reading,
    our_curves,
    paper_curves,
)
from bench.bandwidth.table import (
    GRID_GBIT_S,
    LEVELS,
    Cell,
    cells,
    needed,
    reversed_pairs,
    swapped_methods,
)
from bench.report import Goal, Report, Row, options

WITHIN: Final = 0.20
PEERS: Final = (2, 8)
FULL_PEERS: Final = (2, 8, 64)
DELAYS: Final = (1,)
FULL_DELAYS: Final = (1, 5)
INTELLECT1_TOLERANCE: Final = 0.005
WITHOUT_PEERS: Final = (NOLOCO, NOLOCO_WAITING)
"""The number of peers and tau change nothing here."""
READINGS: Final[Mapping[str, tuple[Reading, bool]]] = {
    "as assumed": (Reading(), False),
    "first point that reaches": (Reading(), True),
    "the same, 13.4 bits": (Reading(13.4, 13.4, 3.35), True),
    "1% more bits": (Reading(16.16, 16.16, 4.04), False),
    "fp32 outer gradients": (Reading(outer_bits=32), False),
    "neighbouring layers": (Reading(strided=False), False),
    "a send every floor(H / F)": (Reading(even=False), False),
    "tau = 2": (Reading(delay_steps=2), False),
    "sent after the step": (Reading(after_step=True), False),
}
"""What is assumed, and whether a value is the first point that reaches the level."""


def main() -> None:
    arguments = options(__doc__).parse_args()
    parts = [paper(), ours(arguments.full), intellect1()]
    if arguments.full:
        parts.append(readings())
    for part in parts:
        path = arguments.json
        part.publish(path and path.with_stem(f"{path.stem}-{part.settings['part']}"))


def paper() -> Report:
    title = "Gbit/s for a compute utilisation, and over the paper's (table 4)"
    found = Report("utilisation", title, {"part": "paper"})
    all_cells = cells(Reading())
    found.rows += [
        _row(all_cells[first : first + len(LEVELS)])
        for first in range(0, len(all_cells), len(LEVELS))
    ]
    found.goals = [
        Goal("points of the grid away from the paper, at most", _farthest(all_cells), at_most=1),
        Goal("pairs of cells reversed", len(reversed_pairs(all_cells)), at_most=0),
        Goal("pairs of methods reversed, unrounded", len(swapped_methods(all_cells)), at_most=0),
    ]
    missed = [cell for cell in all_cells if abs(cell.ratio - 1) > WITHIN]
    found.notes = [
        f"{_exact(all_cells)} of {len(all_cells)} cells equal the paper's.",
        f"More than {WITHIN:.0%} away: {'; '.join(map(_name, missed)) or 'none'}.",
    ]
    return found


def ours(full: bool) -> Report:
    title = "Gbit/s for a compute utilisation, unrounded"
    found = Report("utilisation", title, {"part": "ours"})
    for model in MODELS:
        for method, curve in paper_curves(model, Reading()).items():
            found.rows.append(_needed_row(method, model.name, curve))
        alone = our_curves(model, peers=2, delay_steps=1)
        for method in WITHOUT_PEERS:
            found.rows.append(_needed_row(method, model.name, alone[method]))
        for peers in FULL_PEERS if full else PEERS:
            for delay_steps in FULL_DELAYS if full else DELAYS:
                for method, curve in our_curves(model, peers, delay_steps).items():
                    if method not in WITHOUT_PEERS:
                        row = _needed_row(method, model.name, curve, peers, delay_steps)
                        found.rows.append(row)
    return found


def intellect1() -> Report:
    title = "INTELLECT-1: compute utilisation, and that of NoLoCo with int8 on the same links"
    found = Report("utilisation", title, {"part": "intellect1"})
    found.rows = [
        {
            "sites": site.name,
            "all-reduce s": site.all_reduce_s,
            "reported": site.reported,
            "counted": site.counted,
            "Gbit/s": site.link_gbit_s,
            "NoLoCo s": site.noloco_s,
            "NoLoCo, waiting": site.noloco_waiting,
            "NoLoCo": site.noloco,
        }
        for site in SITES
    ]
    worst = max(abs(site.counted - site.reported) for site in SITES)
    found.goals = [Goal("counted less reported, largest", worst, at_most=INTELLECT1_TOLERANCE)]
    return found


def readings() -> Report:
    title = "Other choices for what the paper leaves open"
    found = Report("utilisation", title, {"part": "readings"})
    for name, (reading, reaches) in READINGS.items():
        all_cells = cells(reading, reaches=reaches)
        found.rows.append(
            {
                "reading": name,
                "cells equal": _exact(all_cells),
                "within one point": sum(abs(cell.steps) <= 1 for cell in all_cells),
                "farthest, points": _farthest(all_cells),
                "mean, points": sum(cell.steps for cell in all_cells) / len(all_cells),
                "pairs reversed": len(reversed_pairs(all_cells)),
            }
        )
    return found


def _row(one_method: Sequence[Cell]) -> Row:
    row: dict[str, str | float] = {"method": one_method[0].method, "model": one_method[0].model}
    for cell in one_method:
        row[f"{cell.level:.0%}"] = float(GRID_GBIT_S[cell.ours])
        row[f"/ paper {cell.level:.0%}"] = cell.ratio
    return row


def _needed_row(
    method: str, model: str, curve: Curve, peers: int | None = None, tau: int | None = None
) -> Row:
    levels = {f"{level:.0%}": gbit_s for level, _, gbit_s in needed(curve)}
    return {"method": method, "model": model, "peers": peers, "tau": tau, **levels}


def _exact(all_cells: Sequence[Cell]) -> int:
    return sum(cell.steps == 0 for cell in all_cells)


def _farthest(all_cells: Sequence[Cell]) -> int:
    return max(abs(cell.steps) for cell in all_cells)


def _name(cell: Cell) -> str:
    return f"{cell.method}, {cell.model}, {cell.level:.0%} ({cell.ratio:.2f})"


if __name__ == "__main__":
    main()
