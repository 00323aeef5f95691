"""What peers say to each other on `/loco/fragment/1`; the codec stands in messages.py.

Bulk goes one way: each peer opens one lasting stream to each other one for what it has to send, in
order: contributions to owners, results to all, its stamps when a cycle is over. Questions are asked
on streams of their own.

A result is signed by its owner, so that anybody who holds it can give it to somebody who lacks it:
what is signed lists every chunk of the owner's batch with base, contributors and the digest of its
codes; the codes that follow may be those of some chunks only (`carried`).

What is about a group carries its digest (group.py); so does what an owner signs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, Self

import msgpack

from protocol.fragment.chunk_ledger import ResultRank, Stamp
from protocol.limits import MAX_CHUNKS_PER_FRAGMENT, MAX_CONTRIBUTORS, MAX_FRAGMENTS
from protocol.membership.records import Verify, verify_with_peer_id

from .field_types import Count, Digest, PeerIdText
from .fields import Binary, Integer, Many, Record

DOMAIN: Final = b"loco/v1/fragment-result\0"
DIGEST_BYTES: Final = 16
MAX_WEIGHT: Final = 1 << 32

_CHUNK: Final = Integer(0, MAX_CHUNKS_PER_FRAGMENT - 1)

FragmentIndex = Annotated[int, Integer(0, MAX_FRAGMENTS - 1)]
ChunkIndex = Annotated[int, _CHUNK]
Chunks = Annotated[tuple[int, ...], Many(_CHUNK, MAX_CHUNKS_PER_FRAGMENT)]
ShortDigest = Annotated[bytes, Binary(DIGEST_BYTES)]
Weight = Annotated[int, Integer(0, MAX_WEIGHT)]
Mask = Annotated[int, Integer(0, (1 << MAX_CONTRIBUTORS) - 1)]


@dataclass(frozen=True, slots=True)
class ChunkStamp:
    """The state of one chunk, as its holder says (chunk_ledger.py)."""

    chunk: ChunkIndex
    steps: Count
    weight: Count
    digest: ShortDigest

    @classmethod
    def of(cls, chunk: int, stamp: Stamp) -> Self:
        """A chunk's stamp in the form that it has on the wire."""
        return cls(chunk, stamp.steps, stamp.weight, stamp.digest)

    @property
    def stamp(self) -> Stamp:
        """The stamp in the form that the ledger has."""
        return Stamp(self.steps, self.weight, self.digest)


ChunkStamps = Annotated[tuple[ChunkStamp, ...], Many(Record(ChunkStamp), MAX_CHUNKS_PER_FRAGMENT)]


@dataclass(frozen=True, slots=True)
class Contribution:
    """The sender's codes of those chunks that the receiver owns follow, in the order of `stamps`.

    Attributes:
        cycle: which send of the fragment.
        weight: what they count; 0 says that nothing will come (and no codes follow).
        steps, tokens: trained since the fragment's last send.
        stamps: what the codes are differences from.
        digest: of the codes.
    """

    group: Digest
    fragment: FragmentIndex
    cycle: Count
    weight: Weight
    steps: Count
    tokens: Count
    stamps: ChunkStamps
    digest: ShortDigest


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The average of one chunk.

    Attributes:
        steps, weight, base: the stamp that it is to be applied to.
        mask: who is in it; bit i stands for the i-th of the result's contributors.
        digest: of its codes.
    """

    chunk: ChunkIndex
    steps: Count
    weight: Count
    base: ShortDigest
    mask: Mask
    digest: ShortDigest

    @property
    def base_stamp(self) -> Stamp:
        """The stamp of the base in the form that the ledger has."""
        return Stamp(self.steps, self.weight, self.base)


@dataclass(frozen=True, slots=True)
class Result:
    """What an owner made of the contributions to its chunks; the codes of `carried` follow.

    Attributes:
        contributors: peer ids, sorted.
        weights: of each of them.
        signature: the owner's, over all but `carried`.
    """

    group: Digest
    fragment: FragmentIndex
    cycle: Count
    owner: PeerIdText
    contributors: Annotated[tuple[str, ...], Many(PeerIdText.__metadata__[0], MAX_CONTRIBUTORS)]
    weights: Annotated[tuple[int, ...], Many(Integer(1, MAX_WEIGHT), MAX_CONTRIBUTORS)]
    chunks: Annotated[tuple[ChunkResult, ...], Many(Record(ChunkResult), MAX_CHUNKS_PER_FRAGMENT)]
    carried: Chunks
    signature: Annotated[bytes, Binary(64)]

    def chunk(self, index: int) -> ChunkResult | None:
        """What is said of a chunk, if anything."""
        return next((chunk for chunk in self.chunks if chunk.chunk == index), None)

    def contributors_of(self, chunk: ChunkResult) -> tuple[str, ...]:
        """The peers that are in the average of a chunk."""
        return tuple(peer_id for i, peer_id in enumerate(self.contributors) if chunk.mask >> i & 1)

    def outcome(self, chunk: ChunkResult) -> ResultRank:
        """What the ledger compares."""
        weights = (weight for i, weight in enumerate(self.weights) if chunk.mask >> i & 1)
        return ResultRank(sum(weights), chunk.digest)

    def is_genuine(self, verify: Verify = verify_with_peer_id) -> bool:
        """Whether the owner has signed it, and it makes sense."""
        known = len(self.contributors)
        fits = len(self.weights) == known and all(
            0 < chunk.mask < 1 << known for chunk in self.chunks
        )
        return fits and verify(self.owner, signed_bytes(self), self.signature)


def signed_bytes(result: Result) -> bytes:
    """What the owner signs."""
    body = (
        result.group,
        result.fragment,
        result.cycle,
        result.owner,
        result.contributors,
        result.weights,
        [(c.chunk, c.steps, c.weight, c.base, c.mask, c.digest) for c in result.chunks],
    )
    packed: bytes = msgpack.packb(body)
    return DOMAIN + packed


def signed_result(unsigned: Result, sign: Callable[[bytes], bytes]) -> Result:
    """The same, under its owner's signature."""
    return Result(
        unsigned.group,
        unsigned.fragment,
        unsigned.cycle,
        unsigned.owner,
        unsigned.contributors,
        unsigned.weights,
        unsigned.chunks,
        unsigned.carried,
        sign(signed_bytes(unsigned)),
    )


@dataclass(frozen=True, slots=True)
class FragmentSettled:
    """The sender is through with this cycle of the fragment; the digest is of all its stamps."""

    group: Digest
    fragment: FragmentIndex
    cycle: Count
    digest: ShortDigest


@dataclass(frozen=True, slots=True)
class NoResult:
    """The sender has nothing to give for its chunks of this cycle: do not wait for it."""

    group: Digest
    fragment: FragmentIndex
    cycle: Count


@dataclass(frozen=True, slots=True)
class GetStamps:
    """Which states are your chunks of this fragment in?"""

    group: Digest
    fragment: FragmentIndex


@dataclass(frozen=True, slots=True)
class Stamps:
    """Answer to GetStamps: of each chunk, with the cycle of its last step (-1 before the first)."""

    fragment: FragmentIndex
    stamps: ChunkStamps
    cycles: Annotated[tuple[int, ...], Many(Integer(-1, (1 << 63) - 1), MAX_CHUNKS_PER_FRAGMENT)]


@dataclass(frozen=True, slots=True)
class GetResult:
    """Send me the result that you applied to this chunk in this cycle."""

    group: Digest
    fragment: FragmentIndex
    cycle: Count
    chunk: ChunkIndex


@dataclass(frozen=True, slots=True)
class GetChunkState:
    """Send me this chunk as you have it."""

    group: Digest
    fragment: FragmentIndex
    chunk: ChunkIndex


@dataclass(frozen=True, slots=True)
class ChunkState:
    """Outer copy and momentum of a chunk follow, fp32; `cycle` is that of its last step."""

    fragment: FragmentIndex
    cycle: Annotated[int, Integer(-1, (1 << 63) - 1)]
    stamp: Annotated[ChunkStamp, Record(ChunkStamp)]
