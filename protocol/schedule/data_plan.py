"""The blocks of the corpus that each peer trains, and when, without any peer asking another.

While membership is stable, each block is trained exactly once per epoch. At a change of membership,
the blocks between the positions of the peers concerned are lost or repeated, and can be counted
from what the peers publish.

Idea:
1. An epoch is an order of the blocks, place after place; it goes through few pieces of the corpus
   at a time.
2. Each place has an owner, drawn so that members have exact shares all along, and so that most
   pieces are one member's: a member needs its share of the pieces, no more.
3. A peer walks its own places in increasing order. Its `position` is the place up to which its own
   are done, and the only state. At the epoch's end it goes on with its own places of the next one.

Members move at the same pace when their weights follow their speeds: all positions advance
together, so that a change of membership concerns about one round's worth of blocks. A joiner starts
at the median position of the others.

The order of an epoch. A corpus is cut into pieces of `piece_blocks` blocks
(protocol/content/manifest.py); the last one may be shorter. An order that knew nothing of pieces
would make every peer need all of them at once. So an epoch goes through few pieces at a time:

1. The pieces of an epoch stand in a shuffled order, cut into *strata* of up to STRATUM_COLUMNS
   neighbours. A stratum is gone through whole before the next one begins.
2. The pieces of a stratum are its *columns*. Each *row* takes one block of each of them, the
   columns in an order of the row's own; the block is drawn from the piece without replacement. So
   neighbours in the order are blocks of different pieces, and of anywhere in them.

    place       0 1 2 ... g-1 | g ...  | ...          g columns, `piece_blocks` rows
                row 0           row 1

Each column is a *hole* in as many rows as its piece has blocks less than `piece_blocks`.

Invariants: places and blocks correspond one to one, holes apart; every peer finds the same, from
seed and epoch alone.

The owners of the places of a stratum have exact shares, and few change when members do. Weighted
rendezvous hashing gives each member a share in proportion to its weight, and moves only the places
that a member that comes or goes gains or gives up. But its shares are right on average alone:
members of equal weight drift apart as a random walk does. So each draw is made among a bounded
number of things, and a member gives up what it has won above its share:

1. *Columns*. A column has as many units as its blocks times all weights, and a
   member may take as many units as are its share of the stratum. Pairs of a column and a member are
   gone through from the lowest cost to the highest, -log(u) / weight with u drawn for the pair; the
   member takes what it still may of what is left of the column. Each pair uses up one of the two,
   so members and columns make less than (members + columns) pairs: almost every column has one
   owner, and few have several.
2. *Rows* of a column with several owners, in bands of BAND_ROWS. Each row is drawn by rendezvous
   hashing; then members that have won more rows of the band than are theirs give up the dearest,
   and those that have too few take them, the cheapest first. Their numbers are rounded so that all
   bands up to any one are right within one row.

Invariants: each cell has one owner, the same for all who know the same members, in whatever order;
after any number of whole bands a member has its share of the places within one for each column that
it shares; so drift does not grow with what was trained. (Logarithms may differ in the last bit
between machines: two draws that close meet once in about 1e15, and cost what a change of members
does.)

Source: Thaler and Ravishankar 1998 (rendezvous hashing); Mirrokni, Thorup and Zadimoghaddam 2018
(bounded loads); what is here is a fractional form of greedy matching.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.errors import LocalProtocolError
from protocol.limits import MAX_ITERATION

from .shuffle import Int64Vector, UInt64Vector, digest_words, permuted, splitmix64, uniform

# --- epoch order ----------------------------------------------------------------------------------
STRATUM_COLUMNS: Final = 256
"""Pieces that an epoch goes through at the same time, at most."""
HOLE: Final = -1
NOBODY: Final = HOLE
"""The owner of such a place."""


class Cells(NamedTuple):
    """Places of an epoch: which column of which stratum, and in which row; int64 [n] each."""

    stratum: Int64Vector
    row: Int64Vector
    column: Int64Vector


# --- ownership ------------------------------------------------------------------------------------
Members = Sequence[tuple[str, int]]
"""(peer id, weight) of everyone who takes data; weight 0 takes none."""
Share = tuple[int, int]
"""Index of a member, and its units of a column."""

BAND_ROWS: Final = 1024
"""Rows of a column in which shares are exact."""
_KEPT: Final = 64
"""Strata, and bands of one, that are not worked out anew."""


class Ownership:
    """The owners of one stratum. Members are named by their index in the sorted ones.

    Args:
        sizes: blocks of each column.
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
        self._band = lru_cache(_KEPT)(self._drawn)

    def owners(self, row: Int64Vector, column: Int64Vector) -> Int64Vector:
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

    def _drawn(self, column: int, band: int) -> Int64Vector:
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
    """The bid of each member for each thing, the lowest wins; float64 [members, things]."""
    hashed = splitmix64(things + digest_words(f"owner/{key}", 1))
    drawn = splitmix64(hashed[None, :] ^ members[:, None])
    costs: npt.NDArray[np.float64] = -np.log(uniform(drawn)) / np.array(weights, float)[:, None]
    return costs


_ownership = lru_cache(_KEPT)(Ownership)


# --- data plan ------------------------------------------------------------------------------------
MAX_BLOCKS: Final = 1 << 48
_MAX_SCAN_PLACES: Final = 1 << 17
"""Places looked at in one go: bounds memory, and keeps it in the cache."""
_MAX_EPOCHS_PER_TAKE: Final = 10_000
"""A tiny corpus may leave a member without a place for many epochs; not forever."""


@dataclass(frozen=True, slots=True)
class TakenBlocks:
    """The next blocks of one member.

    Attributes:
        blocks: int64 [count].
        epoch, position: where the member stands when it has trained them.
    """

    blocks: Int64Vector
    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class MemberPosition:
    peer_id: str
    weight: int
    epoch: int
    position: int


class DataPlan:
    """The plan for `num_blocks` blocks, drawn from `seed`.

    Args:
        piece_blocks: blocks of one piece of the corpus; None where it is all one piece.

    Raises:
        LocalProtocolError: bounds are passed.
    """

    def __init__(self, seed: int, num_blocks: int, piece_blocks: int | None = None) -> None:
        size = num_blocks if piece_blocks is None else piece_blocks
        if not 1 <= num_blocks <= MAX_BLOCKS or size < 1:
            raise LocalProtocolError(f"{num_blocks} blocks; 1 to {MAX_BLOCKS} can be planned")
        self.seed = seed
        self.num_blocks = num_blocks
        self.piece_blocks = min(num_blocks, size)

    # --- the order of an epoch ----------------------------------------------------------------
    @property
    def num_pieces(self) -> int:
        return -(-self.num_blocks // self.piece_blocks)

    @property
    def num_places(self) -> int:
        """Places of an epoch, holes among them: its end is the highest position."""
        return self.num_pieces * self.piece_blocks

    @property
    def num_strata(self) -> int:
        return -(-self.num_pieces // STRATUM_COLUMNS)

    def holds(self, epoch: int, position: int) -> bool:
        """Whether anybody can stand there: what others say of themselves may be anything."""
        return 0 <= epoch <= MAX_ITERATION and 0 <= position <= self.num_places

    def start_position(self, told: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """Where a joiner starts: the lower median (epoch, position) of the others; (0, 0) if alone.

        Those who cannot stand where they say are not counted.
        """
        positions = sorted(place for place in told if self.holds(*place))
        return positions[(len(positions) - 1) // 2] if positions else (0, 0)

    @cached_property
    def _first_columns(self) -> Int64Vector:
        strata = np.arange(self.num_strata + 1, dtype=np.int64)
        return strata * self.num_pieces // self.num_strata

    def stratum_at(self, place: int) -> int:
        """The stratum that a place lies in; of the epoch's end, the one after the last."""
        starts = self._first_columns * self.piece_blocks
        return int(np.searchsorted(starts, place, side="right")) - 1

    def pieces_of(self, epoch: int, stratum: int) -> Int64Vector:
        first, end = self._first_columns[stratum : stratum + 2]
        columns = np.arange(end - first, dtype=np.int64)
        return self.pieces(epoch, np.full(end - first, stratum), columns)

    def strata_of_pieces(self, epoch: int) -> Int64Vector:
        """The stratum that each piece is in; int64 [pieces]."""
        strata = np.repeat(np.arange(self.num_strata), np.diff(self._first_columns))
        column = np.arange(self.num_pieces, dtype=np.int64) - self._first_columns[strata]
        found = np.empty(self.num_pieces, np.int64)
        found[self.pieces(epoch, strata, column)] = strata
        return found

    def column_sizes(self, epoch: int, stratum: int) -> tuple[int, ...]:
        before = self.pieces_of(epoch, stratum) * self.piece_blocks
        return tuple(np.minimum(self.num_blocks - before, self.piece_blocks).tolist())

    def cells(self, epoch: int, places: Int64Vector) -> Cells:
        firsts = self._first_columns
        stratum = np.searchsorted(firsts * self.piece_blocks, places, side="right") - 1
        columns = firsts[stratum + 1] - firsts[stratum]
        row, along = np.divmod(places - firsts[stratum] * self.piece_blocks, columns)
        most = -(-self.num_pieces // self.num_strata)
        row_number = (stratum * self.piece_blocks + row).astype(np.uint64)
        column = permuted(along, columns, most, f"row/{self.seed}/{epoch}", row_number)
        return Cells(stratum, row, column)

    def pieces(self, epoch: int, stratum: Int64Vector, column: Int64Vector) -> Int64Vector:
        at = self._first_columns[stratum] + column
        return permuted(at, self.num_pieces, self.num_pieces, f"pieces/{self.seed}/{epoch}", None)

    # --- what a member takes ------------------------------------------------------------------
    def take(self, epoch: int, position: int, count: int, me: str, members: Members) -> TakenBlocks:
        """The next `count` blocks of `me`, which has done its places below `position`.

        Raises:
            LocalProtocolError: `me` is no member with a weight, or the position is out of range.
        """
        share = _share(me, members)
        if not 0 <= position <= self.num_places or epoch < 0 or count < 0:
            raise LocalProtocolError(f"cannot take {count} from place {position} of epoch {epoch}")
        index, taken = sorted(members).index((me, dict(members)[me])), [np.empty(0, np.int64)]
        last_epoch = epoch + _MAX_EPOCHS_PER_TAKE
        while count:
            if epoch > last_epoch:
                raise LocalProtocolError(f"{self.num_blocks} blocks are too few to share with {me}")
            # Our share of that is a row more than `count`, as far as can be expected.
            ahead = min(_MAX_SCAN_PLACES, int(1.1 * count / share) + STRATUM_COLUMNS)
            end = min(self.num_places, position + ahead)
            owners = self.owners(epoch, position, end, members)
            places = position + np.flatnonzero(owners == index)
            blocks = self.blocks_at(epoch, places)
            places, blocks = places[blocks != HOLE][:count], blocks[blocks != HOLE][:count]
            taken.append(blocks)
            count -= len(places)
            position = int(places[-1]) + 1 if count == 0 else end
            if count and position == self.num_places:
                epoch, position = epoch + 1, 0
        return TakenBlocks(np.concatenate(taken), epoch, position)

    def blocks_at(self, epoch: int, places: Int64Vector) -> Int64Vector:
        """The blocks at these places of the epoch's order, HOLE at holes; int64 [n] to [n]."""
        cells = self.cells(epoch, places)
        pieces = self.pieces(epoch, cells.stratum, cells.column)
        size, key = self.piece_blocks, f"order/{self.seed}/{epoch}"
        inside = permuted(cells.row, size, size, key, pieces.astype(np.uint64))
        blocks = pieces * size + inside
        return np.where(blocks < self.num_blocks, blocks, HOLE)

    def owners(self, epoch: int, start: int, end: int, members: Members) -> Int64Vector:
        """Owners of these places, as indices into the sorted members; int64 [end - start]."""
        cells = self.cells(epoch, np.arange(start, end, dtype=np.int64))
        owners = np.full(end - start, NOBODY, np.int64)
        taking = np.array([i for i, (_, weight) in enumerate(sorted(members)) if weight], np.int64)
        for stratum in np.unique(cells.stratum):
            at = np.flatnonzero(cells.stratum == stratum)
            drawn = self.ownership(epoch, int(stratum), members)
            owners[at] = taking[drawn.owners(cells.row[at], cells.column[at])]
        return owners

    def ownership(self, epoch: int, stratum: int, members: Members) -> Ownership:
        """The owners of a stratum, as indices into the sorted members that have a weight."""
        taking = tuple(member for member in sorted(members) if member[1])
        key = f"{self.seed}/{epoch}/{stratum}"
        return _ownership(key, self.column_sizes(epoch, stratum), taking)

    def lost_and_repeated(
        self, before: Sequence[MemberPosition], after: Sequence[MemberPosition]
    ) -> tuple[int, int]:
        """Blocks left untrained in their epoch by a change of members, and blocks trained twice.

        A place is done if its owner before has passed it, and will be done if its owner after has
        not. Done and to be done: repeated. Neither: lost. Only places between the lowest and the
        highest position are looked at. Nothing is counted where one side is empty.
        """
        if not before or not after:
            return 0, 0
        lost = repeated = 0
        for epoch, start, end in self._disputed((*before, *after)):
            is_block = self.blocks_at(epoch, np.arange(start, end, dtype=np.int64)) != HOLE
            done = self._passed(epoch, start, end, before) & is_block
            to_do = ~self._passed(epoch, start, end, after) & is_block
            lost += int(np.count_nonzero(is_block & ~done & ~to_do))
            repeated += int(np.count_nonzero(done & to_do))
        return lost, repeated

    def _disputed(self, members: Sequence[MemberPosition]) -> Iterator[tuple[int, int, int]]:
        """Ranges (epoch, start, end) that hold all places that some have passed and others not."""
        low = min((m.epoch, m.position) for m in members)
        high = max((m.epoch, m.position) for m in members)
        for epoch in range(low[0], high[0] + 1):
            start = low[1] if epoch == low[0] else 0
            stop = high[1] if epoch == high[0] else self.num_places
            for at in range(start, stop, _MAX_SCAN_PLACES):
                yield epoch, at, min(stop, at + _MAX_SCAN_PLACES)

    def _passed(
        self, epoch: int, start: int, end: int, members: Sequence[MemberPosition]
    ) -> npt.NDArray[np.bool_]:
        """Which of the places their owners among these members have passed; bool [end - start]."""
        ordered = sorted(members, key=lambda m: (m.peer_id, m.weight))
        reached = np.array([self._reached(m, epoch) for m in ordered], np.int64)
        owners = self.owners(epoch, start, end, [(m.peer_id, m.weight) for m in ordered])
        return np.arange(start, end) < reached[owners]

    def _reached(self, member: MemberPosition, epoch: int) -> int:
        if member.epoch == epoch:
            return member.position
        return self.num_places if member.epoch > epoch else 0


def _share(me: str, members: Members) -> float:
    weights = dict(members)
    if len(weights) != len(members) or min(weights.values(), default=0) < 0:
        raise LocalProtocolError("members are to be named once, with weights of 0 or more")
    if not weights.get(me):
        raise LocalProtocolError(f"{me} is no member that takes data")
    return weights[me] / sum(weights.values())
