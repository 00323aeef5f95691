"""The blocks of the corpus that each peer trains, and when, without any peer asking another.

Promise: while membership is stable, each block is trained exactly once per epoch. At a change of
membership, what lies between the positions of the peers concerned is lost or repeated, and can be
counted from what the peers publish.

Idea:
1. An epoch is an order of the blocks, place after place; it goes through few pieces of the corpus
   at a time (epoch_order.py).
2. Each place has an owner, drawn so that members have exact shares all along, and so that most
   pieces are one member's (ownership.py): a member needs its share of the pieces, no more.
3. A peer walks its own places in increasing order. Its `position` is the place up to which its own
   are done, and the only state. At the epoch's end it goes on with its own places of the next one.

Members move at the same pace when their weights follow their speeds: all positions advance
together, so that a change of membership concerns about one round's worth of blocks. A joiner starts
at the median position of the others.

Invariants: the order is a bijection; each place has one owner, the same for all who know the same
members, in whatever order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from protocol.errors import LocalProtocolError

from .epoch_order import HOLE, EpochOrder
from .ownership import NOBODY, Members, Ownership, ownership
from .shuffle import Int64Vector

__all__ = [
    "DataPlan",
    "LostAndRepeated",
    "MemberPosition",
    "Members",
    "TakenBlocks",
    "start_position",
]

MAX_BLOCKS: Final = 1 << 48
MAX_WEIGHT: Final = 1 << 32
_MAX_SCAN_PLACES: Final = 1 << 17
"""Places looked at in one go: bounds memory, and keeps it in the cache."""
_SCAN_MORE_PLACES: Final = 64
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
    """A member, and how far it has come, as it published it."""

    peer_id: str
    weight: int
    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class LostAndRepeated:
    """Blocks that a change of membership leaves untrained in their epoch, or trains twice."""

    lost: int
    repeated: int


def start_position(positions: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Where a joiner starts: the lower median (epoch, position) of the others; (0, 0) if alone."""
    return sorted(positions)[(len(positions) - 1) // 2] if positions else (0, 0)


@dataclass(frozen=True)
class DataPlan:
    """The plan for `num_blocks` blocks, drawn from `seed`.

    Attributes:
        piece_blocks: blocks of one piece of the corpus; None where it is all one piece.
    """

    seed: int
    num_blocks: int
    piece_blocks: int | None = None

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            LocalProtocolError
        """
        if not 1 <= self.num_blocks <= MAX_BLOCKS or (self.piece_blocks or 1) < 1:
            raise LocalProtocolError(f"{self.num_blocks} blocks; 1 to {MAX_BLOCKS} can be planned")

    @cached_property
    def order(self) -> EpochOrder:
        """Which block stands at which place."""
        size = min(self.num_blocks, self.piece_blocks or self.num_blocks)
        return EpochOrder(self.seed, self.num_blocks, size)

    @property
    def num_places(self) -> int:
        """Places of an epoch: its end is the highest position."""
        return self.order.num_places

    def take(self, epoch: int, position: int, count: int, me: str, members: Members) -> TakenBlocks:
        """The next `count` blocks of `me`, which has done its places below `position`.

        Raises:
            LocalProtocolError: `me` is no member with a weight, or the position is out of range.
        """
        share = _share(me, members)
        if not 0 <= position <= self.num_places or epoch < 0 or count < 0:
            raise LocalProtocolError(f"cannot take {count} from place {position} of epoch {epoch}")
        taken = [np.empty(0, np.int64)]
        last_epoch = epoch + _MAX_EPOCHS_PER_TAKE
        while count:
            if epoch > last_epoch:
                raise LocalProtocolError(f"{self.num_blocks} blocks are too few to share with {me}")
            end = min(self.num_places, position + _scan_places(count, share))
            places = self._own_places(epoch, position, end, me, members)
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
        return self.order.blocks(epoch, self.order.cells(epoch, places))

    def owners(self, epoch: int, start: int, end: int, members: Members) -> Int64Vector:
        """Owners of these places, as indices into the sorted members; int64 [end - start]."""
        cells = self.order.cells(epoch, np.arange(start, end, dtype=np.int64))
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
        return ownership(key, self.order.column_sizes(epoch, stratum), taking)

    def lost_and_repeated(
        self, before: Sequence[MemberPosition], after: Sequence[MemberPosition]
    ) -> LostAndRepeated:
        """What a change from members `before` to members `after` costs, at these positions.

        A place is done if its owner before has passed it, and will be done if its owner after has
        not. Done and to be done: repeated. Neither: lost. Only places between the lowest and the
        highest position are looked at. Nothing is counted where one side is empty.
        """
        if not before or not after:
            return LostAndRepeated(0, 0)
        lost = repeated = 0
        for epoch, start, end in self._disputed((*before, *after)):
            is_block = self.blocks_at(epoch, np.arange(start, end, dtype=np.int64)) != HOLE
            done = self._passed(epoch, start, end, before) & is_block
            to_do = ~self._passed(epoch, start, end, after) & is_block
            lost += int(np.count_nonzero(is_block & ~done & ~to_do))
            repeated += int(np.count_nonzero(done & to_do))
        return LostAndRepeated(lost, repeated)

    def _own_places(
        self, epoch: int, start: int, end: int, me: str, members: Members
    ) -> Int64Vector:
        index = [peer_id for peer_id, _ in sorted(members)].index(me)
        return start + np.flatnonzero(self.owners(epoch, start, end, members) == index)

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
    if len(weights) != len(members) or not all(0 <= w <= MAX_WEIGHT for w in weights.values()):
        raise LocalProtocolError("members are to be named once, with weights of 0 to 2^32")
    if not weights.get(me):
        raise LocalProtocolError(f"{me} is no member that takes data")
    return weights[me] / sum(weights.values())


def _scan_places(count: int, share: float) -> int:
    """How far to look for `count` places of a member with that share: some more than expected."""
    return min(_MAX_SCAN_PLACES, int(1.1 * count / share) + _SCAN_MORE_PLACES)
