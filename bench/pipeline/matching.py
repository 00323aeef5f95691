"""Bottleneck matching: pairs of two sets of machines whose dearest pair is as cheap as can be.

Idea: under a limit, only pairs at most so dear are allowed, and a matching of them grows by
augmenting paths (Kuhn). The least limit that pairs the whole smaller set is found by halving the
sorted prices. For a handful of machines all permutations are tried: faster than being clever.
"""

from collections.abc import Sequence
from itertools import permutations
from typing import Final

TRY_ALL: Final = 4
"""Up to so many on the larger side, permutations are tried."""


def bottleneck(prices: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
    """The dearest pair's price, and the column of each row.

    Args:
        prices: one row for each machine of the smaller set.
    """
    if len(prices[0]) <= TRY_ALL:
        worst, columns = min(
            (max(row[c] for row, c in zip(prices, chosen, strict=True)), chosen)
            for chosen in permutations(range(len(prices[0])), len(prices))
        )
        return worst, list(columns)
    limits = sorted({price for row in prices for price in row})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if _paired(prices, limits[middle]) is None:
            low = middle + 1
        else:
            high = middle
    return limits[low], _paired(prices, limits[low]) or []


def _paired(prices: Sequence[Sequence[int]], limit: int) -> list[int] | None:
    owner: dict[int, int] = {}
    for row in range(len(prices)):
        if not _augment(prices, limit, row, owner, set()):
            return None
    return [column for column, _ in sorted(owner.items(), key=lambda pair: pair[1])]


def _augment(
    prices: Sequence[Sequence[int]], limit: int, row: int, owner: dict[int, int], seen: set[int]
) -> bool:
    for column, price in enumerate(prices[row]):
        if price <= limit and column not in seen:
            seen.add(column)
            if column not in owner or _augment(prices, limit, owner[column], owner, seen):
                owner[column] = row
                return True
    return False
