"""Every expert on every domain: who is best where, and where more training would gain most.

The matrix has a row for each expert, a row for the ensemble of them, and a column for each domain.
It fills as peers measure: an expert's own peers take the domains one at a time. A star marks the
lowest loss of a column; equal losses have one each.

Gain. The founder may give an expert more steps (protocol/run/amendments.py). A swarm can measure
where that pays: an expert's gain is the fall of its own domain's loss per FLOP, by least squares
over its last KEPT_VALIDATIONS validations. Moving FLOPs from one expert to another lowers the sum
of losses in proportion to the difference of their gains, so a move is advised from the least gain
to the largest, if these differ by more than SURE standard errors of the difference.

It is advice. Unequal steps moved loss from one domain to another and lowered the sum by 0.005 nats
a domain (0.9M parameters, three domains); and where rates fall to the end of a run, curves are
steep there whatever is added. So slopes are compared between experts that stand at the same share
of their budgets.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median_low
from typing import Final

KEPT_VALIDATIONS: Final = 8
"""Validations whose slope is taken."""
LEAST_POINTS: Final = 3
"""Two points have a slope, and no error."""
SURE: Final = 2.0
PETA: Final = 1e15
SAME_SHARE: Final = 0.1
"""Experts whose shares of their budgets differ by less than this stand at the same share."""
ENSEMBLE: Final = "ensemble"
Loss = float | None
"""None: not measured yet."""
TableRow = tuple[str, Sequence[Loss]]
"""A name, and a loss for each column."""


def lines_of_table(
    columns: Sequence[str], rows: Sequence[TableRow], gains: Sequence[float | None] = ()
) -> Iterator[str]:
    """Losses as text, a column for each domain, whose lowest ones have stars.

    Args:
        gains: of the first rows, nats per FLOP; shown per PETA of them.
    """
    best = [_lowest([losses[at] for _, losses in rows]) for at in range(len(columns))]
    cells = [list(map(_cell, losses, best)) for _, losses in rows]
    names, heads = [name for name, _ in rows], [f"{each} " for each in columns]
    if any(gain is not None for gain in gains):
        heads.append("gain ")
        for row, gain in zip_longest(cells, gains):
            row.append("- " if gain is None else f"{gain * PETA:.3g} ")
    wide, widths = max(map(len, names)), [max(len(head), 7) for head in heads]
    for name, row in zip(["", *names], [heads, *cells], strict=True):
        line = [name.ljust(wide), *(c.rjust(w) for c, w in zip(row, widths, strict=True))]
        yield "  ".join(line)


def _lowest(losses: Sequence[Loss]) -> Loss:
    return min((loss for loss in losses if loss is not None), default=None)


def _cell(loss: Loss, best: Loss) -> str:
    return "- " if loss is None else f"{loss:.4f}{'*' if loss == best else ' '}"


def losses_of_expert(told: Sequence[Mapping[int, float]], domains: int) -> tuple[Loss, ...]:
    """An expert's row: the middle of what its peers tell, so that one liar moves little."""
    heard = ([each[domain] for each in told if domain in each] for domain in range(domains))
    return tuple(median_low(losses) if losses else None for losses in heard)


@dataclass(frozen=True, slots=True)
class MarginalGain:
    """The fall of a loss per FLOP, and its standard error."""

    per_flop: float
    error: float


def gain_of(curve: Sequence[tuple[float, float]]) -> MarginalGain | None:
    """The gain by the end of a curve of (FLOPs, loss); None where that cannot be said yet."""
    points = curve[-KEPT_VALIDATIONS:]
    count = len(points)
    if count < LEAST_POINTS:
        return None
    middle, level = (math.fsum(each) / count for each in zip(*points, strict=True))
    spread = math.fsum((flops - middle) ** 2 for flops, _ in points)
    if not spread:
        return None
    slope = math.fsum((flops - middle) * (loss - level) for flops, loss in points) / spread
    misses = math.fsum((loss - level - slope * (flops - middle)) ** 2 for flops, loss in points)
    return MarginalGain(-slope, math.sqrt(misses / (count - 2) / spread))


@dataclass(slots=True)
class LossCurve:
    """An expert's loss on its own domain, by the FLOPs that went into it.

    Attributes:
        share: of its budget that is spent.
    """

    points: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=KEPT_VALIDATIONS)
    )
    share: float = 0.0

    def note(self, share: float, budget: float, loss: Loss) -> None:
        """Take a loss, if it is a new one of a later time."""
        self.share = share
        newest = self.points[-1] if self.points else (-1.0, None)
        if loss is not None and loss != newest[1] and share * budget > newest[0]:
            self.points.append((share * budget, loss))

    @property
    def gain(self) -> MarginalGain | None:
        return gain_of(tuple(self.points))


@dataclass(frozen=True, slots=True)
class Advice:
    """To move FLOPs from one expert to another, and by how much a FLOP lowers the sum of losses."""

    source: str
    target: str
    per_flop: float


def advice_of(gains: Mapping[str, MarginalGain]) -> Advice | None:
    """The move that would help most; None where none surely helps."""
    if not gains:
        return None
    order = sorted(gains, key=lambda name: (gains[name].per_flop, name))
    least, most = gains[order[0]], gains[order[-1]]
    difference = most.per_flop - least.per_flop
    if difference <= SURE * math.hypot(least.error, most.error):
        return None
    return Advice(order[0], order[-1], difference)


def advice_at_one_share(curves: Mapping[str, LossCurve]) -> Advice | None:
    """Advice among the experts that have spent as much of their budgets as the first of them."""
    most = max((curve.share for curve in curves.values()), default=0.0)
    near = {name: each.gain for name, each in curves.items() if most - each.share < SAME_SHARE}
    return advice_of({name: gain for name, gain in near.items() if gain is not None})
