"""The span of the flat vector that each rank's optimizer moves.

A rank is one of the processes of a machine that train one model together (group.py). Spans are
contiguous, in the order of the ranks, and cover the vector. AdamW's values may be cut wherever a
block of the codecs ends; Muon's matrices are whole, because its iteration needs all of a matrix. So
that all ranks are done at the same time, spans are of equal work and not of equal length; of equal
length where a rank has no weights but those of its span: memory is short there (../sharded.py).
"""

from collections.abc import Collection
from itertools import pairwise
from typing import Final

from protocol.run.layout import ALIGNMENT, Layout, LayoutEntry

ADAMW_WORK: Final = 128
"""Work of AdamW for a value; that of Muon is the shorter side of its matrix, for its products. Both
move a value through memory. Estimated from a GPU's data sheet, not measured."""


def spans_of(
    layout: Layout, count: int, muon: Collection[int], *, by_size: bool = False
) -> tuple[slice, ...]:
    """A span for each of `count` ranks; some are empty where the vector is too short.

    Args:
        muon: offsets of the matrices that are Muon's.
        by_size: whether all values are taken to be of the same work.
    """
    dearer = () if by_size else muon
    total = sum(_work(entry, dearer) for entry in layout.entries)
    cuts = [_cut(layout, muon, dearer, total * rank // count) for rank in range(1, count)]
    return tuple(slice(*span) for span in pairwise((0, *cuts, layout.padded_parameters)))


def _cut(layout: Layout, muon: Collection[int], dearer: Collection[int], target: int) -> int:
    """The place before which about so much of the work lies."""
    for entry in layout.entries:
        work = _work(entry, dearer)
        if target < work:
            if entry.offset in muon:
                return entry.offset + (entry.padded_size if 2 * target > work else 0)
            return entry.offset + target // ADAMW_WORK // ALIGNMENT * ALIGNMENT
        target -= work
    return layout.padded_parameters


def _work(entry: LayoutEntry, dearer: Collection[int]) -> int:
    return entry.padded_size * (min(entry.shape[-2:]) if entry.offset in dearer else ADAMW_WORK)


def shared_part(one: slice, other: slice) -> slice:
    """The intersection of two slices; an empty slice where that is nothing."""
    start = max(one.start, other.start)
    return slice(start, max(start, min(one.stop, other.stop)))
