"""What trainers with stated compute did, and when: out of the lines that they wrote."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of work of one trainer; `number` is its own name of the microbatch."""

    kind: str
    number: int
    start_s: float
    end_s: float


def read_pieces(path: Path) -> list[Piece]:
    """All that is there of a trainer's lines; it may be writing the last one."""
    try:
        lines = path.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [Piece(**json.loads(line)) for line in lines if line.endswith("\n")]


def ends_of_iterations(pieces: Iterable[Piece], share: int) -> list[float]:
    """When a data peer had the last gradient of each iteration, of `share` microbatches."""
    ends = [piece.end_s for piece in pieces if piece.kind == "backward"]
    return ends[share - 1 :: share]


def iteration_times(ends: Sequence[Sequence[float]]) -> list[float]:
    """Seconds from one iteration's end to the next one's, over the ends of all data peers.

    Data peers go in step: nobody ends an iteration before all have ended the one before. Those that
    began alone have ended some that the others never saw, so iterations are counted from the last.
    """
    common = min(len(each) for each in ends)
    lasts = [max(each[len(each) - common + k] for each in ends) for k in range(common)]
    return [after - before for before, after in pairwise(lasts)]
