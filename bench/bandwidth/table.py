"""Table 4 of Streaming DiLoCo, and how a curve is read against it.

The table says how much bandwidth a compute utilisation of 50, 80, 90, 95 and 99% needs. All its
values lie on a logarithmic grid of 50 points from 0.1 to 1000 Gbit/s, 20.7% apart (10 ** (4 / 49)).

Two ways to read a value off the grid are at hand: the last point that stays *below* the level, or
the first that *reaches* it, one point further up. With 16 bits for each parameter the first fits
and the second is a point too high nearly everywhere; with 13.4 bits it is the other way round. The
table alone cannot tell the two apart. Sixteen bits are what gradients have, so the first it is.

Source: arXiv 2501.18512, table 4 (H = 100, fragments of 3 layers).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .methods import (
    DATA_PARALLEL,
    DILOCO,
    MODELS,
    OVERLAPPED,
    OVERLAPPED_FP4,
    STREAMING,
    Curve,
    Reading,
    paper_curves,
)
from .simulator import Values

LEVELS: Final = (0.50, 0.80, 0.90, 0.95, 0.99)
FINER: Final = 20
"""Points of the fine grid for each point of the paper's."""
FINE_GBIT_S: Final[Values] = np.logspace(-1, 3, 49 * FINER + 1)
GRID_GBIT_S: Final[Values] = FINE_GBIT_S[::FINER]
GRID_RATIO: Final = 10 ** (4 / 49)

PAPER_GBIT_S: Final[Mapping[str, Mapping[str, tuple[float, ...]]]] = {
    DATA_PARALLEL: {
        "1B": (86.8, 152.6, 184.2, 222.3, 569.0),
        "10B": (104.8, 222.3, 222.3, 268.3, 471.5),
        "100B": (184.2, 323.8, 390.7, 390.7, 471.5),
    },
    DILOCO: {
        "1B": (1.4, 6.2, 13.3, 23.3, 86.8),
        "10B": (1.7, 7.5, 16.0, 33.9, 104.8),
        "100B": (3.0, 11.0, 23.3, 49.4, 184.2),
    },
    STREAMING: {
        "1B": (1.4, 5.2, 9.1, 16.0, 28.1),
        "10B": (1.7, 5.2, 9.1, 13.3, 19.3),
        "100B": (2.4, 6.2, 9.1, 11.0, 19.3),
    },
    OVERLAPPED: {
        "1B": (1.4, 4.3, 6.2, 9.1, 11.0),
        "10B": (1.7, 3.6, 5.2, 6.2, 7.5),
        "100B": (1.7, 3.6, 4.3, 5.2, 5.2),
    },
    OVERLAPPED_FP4: {
        "1B": (0.4, 0.9, 1.7, 2.0, 3.0),
        "10B": (0.4, 0.9, 1.4, 1.4, 1.7),
        "100B": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of the table beside ours.

    Attributes:
        paper: point of the grid that the paper names.
        ours: point of the grid that the simulator gives.
        exact_gbit_s: where the simulated curve crosses the level.
    """

    method: str
    model: str
    level: float
    paper: int
    ours: int
    exact_gbit_s: float

    @property
    def steps(self) -> int:
        """Points of the grid by which ours lies above the paper's."""
        return self.ours - self.paper

    @property
    def ratio(self) -> float:
        """Ours over the paper's."""
        return float(GRID_RATIO**self.steps)


def cells(reading: Reading, *, reaches: bool = False) -> list[Cell]:
    """All 75 cells of the table.

    Args:
        reaches: read the first point that reaches the level, not the last below it.
    """
    return [
        Cell(method, model.name, level, nearest_point(paper), point + reaches, exact_gbit_s)
        for model in MODELS
        for method, curve in paper_curves(model, reading).items()
        for paper, (level, point, exact_gbit_s) in zip(
            PAPER_GBIT_S[method][model.name], needed(curve), strict=True
        )
    ]


def needed(curve: Curve) -> Iterator[tuple[float, int, float]]:
    """The bandwidth needed for each level: the level, the last point below it, the bandwidth.

    Raises:
        ValueError: the grid's ends do not bracket a level.
    """
    reached = curve(FINE_GBIT_S)
    for level in LEVELS:
        first = int(np.argmax(reached >= level))
        if not reached[0] < level <= reached[-1]:
            raise ValueError(f"the grid does not bracket a utilisation of {level:.0%}")
        sides = slice(first - 1, first + 1)
        log_gbit_s = np.interp(level, reached[sides], np.log(FINE_GBIT_S[sides]))
        yield level, (first - 1) // FINER, float(np.exp(log_gbit_s))


def nearest_point(gbit_s: float) -> int:
    """The nearest point of the paper's grid: the table gives one decimal."""
    return int(np.argmin(np.abs(GRID_GBIT_S - gbit_s)))


def reversed_pairs(found: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Pairs of cells that the paper orders one way and we the other; equal is no order."""
    return [
        (one, other)
        for one, other in itertools.combinations(found, 2)
        if (one.paper - other.paper) * (one.ours - other.ours) < 0
    ]


def swapped_methods(found: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Two methods, same model and level, that the paper orders the other way; ours unrounded."""
    return [
        (one, other)
        for one, other in itertools.combinations(found, 2)
        if (one.model, one.level) == (other.model, other.level)
        and (one.paper - other.paper) * (one.exact_gbit_s - other.exact_gbit_s) < 0
    ]
