"""The owners of the places of a stratum: exact shares, and few moves when members change.

Idea. Weighted rendezvous hashing gives each member a share in proportion to its weight, and moves
only what a member that comes or goes gains or gives up. But its shares are right on average alone:
members of equal weight drift apart as a random walk does. So each draw is made among a bounded
number of things, and what a member has won above its share it gives up:

1. *Columns* (epoch_order.py). A column has as many units as its blocks times all weights, and a
   member may take as many units as are its share of the stratum. Pairs of a column and a member are
   gone through from the lowest cost to the highest, -log(u) / weight with u drawn for the pair; the
   member takes what it still may of what is left of the column. Each pair uses up one of the two,
   so members and columns make less than (members + columns) pairs: almost every column has one
   owner, and few have several.
2. *Rows* of a column with several owners, in bands of BAND_ROWS. Each row is drawn by rendezvous
   hashing; then those that have won more rows of the band than are theirs give up the dearest, and
   those that have too few take them, the cheapest first. What is theirs is rounded so that all
   bands up to any one are right within one row.

Invariants: each cell has one owner, the same for all who know the same members, in whatever order;
after any number of whole bands a member has its share of the places within one for each column that
it shares; so drift does not grow with what was trained. (Logarithms may differ in the last bit
between machines: two draws that close meet once in about 1e15, and cost what a change of members
does.)

Source: Thaler and Ravishankar 1998 (rendezvous hashing); Mirrokni, Thorup and Zadimoghaddam 2018
(bounded loads); what is here is a fractional form of greedy matching.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from .shuffle import Int64Vector, UInt64Vector, digest_words, splitmix64, uniform

Members = Sequence[tuple[str, int]]
"""(peer id, weight) of everyone who takes data; weight 0 takes none."""
Share = tuple[int, int]
"""Index of a member, and its units of a column."""

BAND_ROWS: Final = 1024
"""Rows of a column in which shares are exact."""
NOBODY: Final = -1
_KEPT_BANDS: Final = 128
_KEPT_STRATA: Final = 32


class Ownership:
    """The owners of one stratum. Members are named by their index in the sorted ones.

    Args:
        key: of the stratum.
        sizes: blocks of each of its columns.
        members: sorted.
    """

    def __init__(
        self, key: str, sizes: tuple[int, ...], members: tuple[tuple[str, int], ...]
    ) -> None:
        self._key = key
        self._members = members
        self._hashes = np.array([digest_words(f"member/{name}", 1)[0] for name, _ in members])
        self.shares = self._columns(sizes)
        single = [shares[0][0] if len(shares) == 1 else NOBODY for shares in self.shares]
        self._single = np.array(single, np.int64)
        self._bands: dict[tuple[int, int], Int64Vector] = {}

    def owners(self, row: Int64Vector, column: Int64Vector) -> Int64Vector:
        """Owners of these cells."""
        owners: Int64Vector = self._single[column]
        shared = np.flatnonzero(owners == NOBODY)
        if len(shared):
            bands = row[shared] // BAND_ROWS
            keys = column[shared] * (int(bands.max()) + 1) + bands
            for key in np.unique(keys):
                at = shared[keys == key]
                drawn = self._band(int(column[at[0]]), int(row[at[0]]) // BAND_ROWS)
                owners[at] = drawn[row[at] % BAND_ROWS]
        return owners

    def columns_of(self, member: int) -> list[int]:
        """Columns of which a member owns places."""
        return [
            column
            for column, shares in enumerate(self.shares)
            if any(index == member for index, _ in shares)
        ]

    def _columns(self, sizes: tuple[int, ...]) -> list[tuple[Share, ...]]:
        weights, columns = [weight for _, weight in self._members], len(sizes)
        may_take = [sum(sizes) * weight for weight in weights]
        left = [size * sum(weights) for size in sizes]
        all_left = sum(left)
        shares: list[list[Share]] = [[] for _ in range(columns)]
        cost = _costs(self._key, np.arange(columns, dtype=np.uint64), self._hashes, weights)
        for pair in np.argsort(cost, axis=None, kind="stable"):
            member, column = divmod(int(pair), columns)
            units = min(may_take[member], left[column])
            if units:
                may_take[member] -= units
                left[column] -= units
                shares[column].append((member, units))
                all_left -= units
                if not all_left:
                    break
        return [tuple(sorted(column)) for column in shares]

    def _band(self, column: int, band: int) -> Int64Vector:
        found = self._bands.get((column, band))
        if found is None:
            if len(self._bands) >= _KEPT_BANDS:
                self._bands.clear()
            found = self._bands[column, band] = self._drawn(column, band)
        return found

    def _drawn(self, column: int, band: int) -> Int64Vector:
        """The owners of the rows of a band of a column that several own."""
        shares = self.shares[column]
        members = np.array([member for member, _ in shares])
        units = [units for _, units in shares]
        rows = np.arange(band * BAND_ROWS, (band + 1) * BAND_ROWS, dtype=np.uint64)
        costs = _costs(f"{self._key}/{column}", rows, self._hashes[members], units)
        drawn: Int64Vector = members[_bounded(costs, _due(units, band))]
        return drawn


def _due(units: Sequence[int], band: int) -> list[int]:
    """Rows of a band that are each member's, so that all bands up to it are right within one."""

    def up_to(bands: int, units_before: int) -> int:
        return (2 * units_before * bands * BAND_ROWS + total) // (2 * total)

    total, before, due = sum(units), 0, list[int]()
    for each in units:
        after = before + each
        until = up_to(band + 1, after) - up_to(band + 1, before)
        due.append(until - (up_to(band, after) - up_to(band, before)))
        before = after
    return due


def _bounded(costs: npt.NDArray[np.float64], due: Sequence[int]) -> Int64Vector:
    """Owner of each thing, [members, things] to [things]: each member has as many as are due."""
    owner: Int64Vector = np.argmin(costs, axis=0).astype(np.int64)
    missing = np.array(due) - np.bincount(owner, minlength=len(due))
    given = [
        own[np.argsort(-costs[member, own], kind="stable")[:-excess]]
        for member, excess in enumerate(missing)
        if excess < 0
        for own in [np.flatnonzero(owner == member)]
    ]
    if not given:
        return owner
    things, takers = np.concatenate(given), np.flatnonzero(missing > 0)
    free, to_give = np.ones(len(things), bool), len(things)
    for pair in np.argsort(costs[np.ix_(takers, things)], axis=None, kind="stable"):
        taker, thing = divmod(int(pair), len(things))
        if free[thing] and missing[takers[taker]] > 0:
            owner[things[thing]] = takers[taker]
            missing[takers[taker]] -= 1
            free[thing] = False
            to_give -= 1
            if not to_give:
                break
    return owner


def _costs(
    key: str, things: UInt64Vector, members: UInt64Vector, weights: Sequence[int]
) -> npt.NDArray[np.float64]:
    """What each member bids for each thing, the lowest wins; float64 [members, things]."""
    hashed = splitmix64(things + digest_words(f"owner/{key}", 1))
    drawn = splitmix64(hashed[None, :] ^ members[:, None])
    costs: npt.NDArray[np.float64] = -np.log(uniform(drawn)) / np.array(weights, float)[:, None]
    return costs


@lru_cache(maxsize=_KEPT_STRATA)
def ownership(key: str, sizes: tuple[int, ...], members: tuple[tuple[str, int], ...]) -> Ownership:
    """The owners of a stratum; arguments as of `Ownership`. The last few are kept."""
    return Ownership(key, sizes, members)
