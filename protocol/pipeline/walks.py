"""Shortest walks over priced hops: what no path of a microbatch can be shorter than.

A path visits different machines, which makes the shortest one hard to find among many. A walk is a
relaxation that is not: from its origin, over so many hops, never through the origin again, and
never straight back to the machine that it came from. Up to three hops between relays that is a
path; longer ones may come round in a circle, and are only shorter for it.

For every end of a walk the two shortest are kept that come from different machines: where the next
hop would go straight back, the second one counts.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]
"""Lengths of walks, by origin and end."""
NEVER: Final = 1 << 60


def walks(prices: Sequence[Sequence[int]] | NDArray[Any], hops: int) -> list[Lengths]:
    """The lengths of the shortest walks of one hop, of two, and so on."""
    table = np.array(prices, dtype=np.int64)
    np.fill_diagonal(table, NEVER)
    number = len(table)
    first, second = table.copy(), np.full_like(table, NEVER)
    came_from = np.repeat(np.arange(number)[:, None], number, axis=1)
    found = [first]
    for _ in range(hops - 1):
        first, second, came_from = _longer(table, first, second, came_from)
        found.append(first)
    return found


def closed(prices: Sequence[Sequence[int]], hops: int) -> Lengths:
    """The shortest ways from an origin through a machine and back, by both."""
    table = np.array(prices, dtype=np.int64)
    there, back = walks(table, hops - 1), walks(table.T, hops - 1)
    ways = [there[k] + back[hops - 2 - k] for k in range(hops - 1)]
    shortest: Lengths = np.minimum.reduce(ways)
    return np.minimum(shortest, NEVER)


def _longer(
    table: Lengths, first: Lengths, second: Lengths, came_from: NDArray[np.int64]
) -> tuple[Lengths, Lengths, NDArray[np.int64]]:
    """Walks with one hop more."""
    number = len(table)
    ends = np.arange(number)
    longer = [np.full_like(table, NEVER) for _ in range(2)]
    last = np.zeros_like(came_from)
    for origin in range(number):
        straight_back = came_from[origin][:, None] == ends
        so_far = np.where(straight_back, second[origin][:, None], first[origin][:, None])
        ways = np.minimum(so_far + table, NEVER)
        ways[origin] = ways[:, origin] = NEVER
        last[origin] = ways.argmin(axis=0)
        longer[0][origin] = ways[last[origin], ends]
        ways[last[origin], ends] = NEVER
        longer[1][origin] = ways.min(axis=0)
    return longer[0], longer[1], last
