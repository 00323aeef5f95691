"""The blocks of the corpus that each peer trains, and when, without any peer asking another.

Promise: while membership is stable, each block is trained exactly once per epoch. At a change of
membership, what lies between the positions of the peers concerned is lost or repeated, and can be
counted from what the peers publish.

Idea:
1. An epoch is a permutation of the blocks: place -> block. It is a Feistel network over the
   smallest power of two that holds all blocks, with cycle walking (a value outside is sent through
   again); keyed by seed and epoch, computed for any places at once, and stored nowhere.
2. The owner of a place is decided by weighted rendezvous hashing over the members: each draws u
   from a hash of (seed, epoch, bucket of the place, member), and the smallest -log(u) / weight
   wins. That gives each member a share in proportion to its weight, and a member that comes or goes
   moves only the places that it gains or gives up. BUCKET_PLACES neighbours share one draw, to save
   work.
3. A peer walks its own places in increasing order. Its `position` is the place up to which its own
   are done, and the only state. At the epoch's end it goes on with its own places of the next one.

Members move at the same pace when their weights follow their speeds: all positions advance
together, so that a change of membership concerns about one round's worth of blocks. (They drift
apart as a random walk does, by about sqrt(BUCKET_PLACES * own blocks done) own blocks: one more
reason for small buckets.) A joiner starts at the median position of the others.

Invariants: the permutation is a bijection; each place has one owner, the same for all who know the
same members, in whatever order. (Logarithms may differ in the last bit between machines: two draws
that close meet once in about 1e15 places, and cost one block.)

Source: Thaler and Ravishankar 1998 (rendezvous hashing); Black and Rogaway 2002 (cycle walking).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import blake3
import numpy as np
import numpy.typing as npt

from protocol.errors import LocalProtocolError

Int64Vector = npt.NDArray[np.int64]
UInt64Vector = npt.NDArray[np.uint64]
Members = Sequence[tuple[str, int]]
"""(peer id, weight) of everyone who takes data; weight 0 takes none."""

BUCKET_PLACES: Final = 2
FEISTEL_ROUNDS: Final = 8
MAX_BLOCKS: Final = 1 << 48
MAX_WEIGHT: Final = 1 << 32
_MAX_SCAN_PLACES: Final = 1 << 17
"""Places looked at in one go: bounds memory, and keeps it in the cache."""
_MAX_EPOCHS_PER_TAKE: Final = 10_000
"""A tiny corpus may leave a member without a place for many epochs; not forever."""


@dataclass(frozen=True, slots=True)
class Taken:
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


@dataclass(frozen=True, slots=True)
class DataPlan:
    """The plan for `num_blocks` blocks, drawn from `seed`."""

    seed: int
    num_blocks: int

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            LocalProtocolError
        """
        if not 1 <= self.num_blocks <= MAX_BLOCKS:
            raise LocalProtocolError(f"{self.num_blocks} blocks; 1 to {MAX_BLOCKS} can be planned")

    def take(self, epoch: int, position: int, count: int, me: str, members: Members) -> Taken:
        """The next `count` blocks of `me`, which has done its places below `position`.

        Raises:
            LocalProtocolError: `me` is no member with a weight, or the position is out of range.
        """
        share = _share(me, members)
        if not 0 <= position <= self.num_blocks or epoch < 0 or count < 0:
            raise LocalProtocolError(f"cannot take {count} from place {position} of epoch {epoch}")
        taken = [np.empty(0, np.int64)]
        last_epoch = epoch + _MAX_EPOCHS_PER_TAKE
        while count:
            if epoch > last_epoch:
                raise LocalProtocolError(f"{self.num_blocks} blocks are too few to share with {me}")
            end = min(self.num_blocks, position + _scan_places(count, share))
            places = self._own_places(epoch, position, end, me, members)[:count]
            taken.append(self.blocks_at(epoch, places))
            count -= len(places)
            position = int(places[-1]) + 1 if count == 0 else end
            if count and position == self.num_blocks:
                epoch, position = epoch + 1, 0
        return Taken(np.concatenate(taken), epoch, position)

    def blocks_at(self, epoch: int, places: Int64Vector) -> Int64Vector:
        """The blocks at these places of the epoch's order; int64 [n] to int64 [n]."""
        bits = (self.num_blocks - 1).bit_length()
        keys = _digest_words(f"order/{self.seed}/{epoch}", FEISTEL_ROUNDS)
        values = places.astype(np.uint64)
        todo = np.arange(len(values))
        while len(todo):
            values[todo] = _feistel(values[todo], bits, keys)
            todo = todo[values[todo] >= np.uint64(self.num_blocks)]
        return values.astype(np.int64)

    def owners(self, epoch: int, start: int, end: int, members: Members) -> Int64Vector:
        """Owners of these places, as indices into the sorted members; int64 [end - start]."""
        first = start // BUCKET_PLACES
        buckets = np.arange(first, -(-end // BUCKET_PLACES), dtype=np.uint64)
        drawn = _rendezvous(buckets, _digest_words(f"owner/{self.seed}/{epoch}", 1), members)
        skipped = start - first * BUCKET_PLACES
        return np.repeat(drawn, BUCKET_PLACES)[skipped : skipped + end - start]

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
            done = self._passed(epoch, start, end, before)
            to_do = ~self._passed(epoch, start, end, after)
            lost += int(np.count_nonzero(~done & ~to_do))
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
            stop = high[1] if epoch == high[0] else self.num_blocks
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
        return self.num_blocks if member.epoch > epoch else 0


def _share(me: str, members: Members) -> float:
    weights = dict(members)
    if len(weights) != len(members) or not all(0 <= w <= MAX_WEIGHT for w in weights.values()):
        raise LocalProtocolError("members are to be named once, with weights of 0 to 2^32")
    if not weights.get(me):
        raise LocalProtocolError(f"{me} is no member that takes data")
    return weights[me] / sum(weights.values())


def _scan_places(count: int, share: float) -> int:
    """How far to look for `count` places of a member with that share: some more than expected."""
    return min(_MAX_SCAN_PLACES, int(1.1 * count / share) + 4 * BUCKET_PLACES)


def _rendezvous(buckets: UInt64Vector, key: UInt64Vector, members: Members) -> Int64Vector:
    """Index, among the sorted members, of each bucket's owner."""
    hashed = _splitmix64(buckets + key)
    best = np.full(len(buckets), np.inf)
    owner = np.zeros(len(buckets), np.int64)
    for index, (peer_id, weight) in enumerate(sorted(members)):
        if weight:
            drawn = _splitmix64(hashed ^ _digest_words(f"member/{peer_id}", 1))
            cost = -np.log(_uniform(drawn)) / weight
            wins = cost < best
            best[wins] = cost[wins]
            owner[wins] = index
    return owner


def _uniform(hashed: UInt64Vector) -> npt.NDArray[np.float64]:
    """53 bits of each hash as a number strictly between 0 and 1."""
    return ((hashed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _feistel(values: UInt64Vector, bits: int, keys: UInt64Vector) -> UInt64Vector:
    """A keyed bijection of [0, 2^bits): the halves take turns in masking each other."""
    right_bits = np.uint64(bits // 2)
    right_mask = (np.uint64(1) << right_bits) - np.uint64(1)
    left_mask = (np.uint64(1) << np.uint64(bits - bits // 2)) - np.uint64(1)
    left, right = values >> right_bits, values & right_mask
    for number, key in enumerate(keys):
        if number % 2:
            right = right ^ (_splitmix64(left ^ key) & right_mask)
        else:
            left = left ^ (_splitmix64(right ^ key) & left_mask)
    return (left << right_bits) | right


def _splitmix64(x: UInt64Vector) -> UInt64Vector:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection that mixes all bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _digest_words(text: str, count: int) -> UInt64Vector:
    """The first `count` little-endian words of a digest; uint64 [count]."""
    digest = blake3.blake3(text.encode()).digest(length=8 * count)
    return np.frombuffer(digest, "<u8").astype(np.uint64)
