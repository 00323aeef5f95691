"""What peers say to each other on `/loco/fragment/1`; the codec stands in messages.py.

Bulk goes one way: each peer opens one lasting stream to each other one for what it has to send, in
order: contributions to owners, results to all, its stamps when a cycle is over. Questions are asked
on streams of their own.

A contribution is signed by its sender: its owner can prove what it was sent, and with it that the
result follows from that (protocol/diloco/audits.py). A result is signed by its owner, so that
anybody who holds it can give it to somebody who lacks it: what is signed lists every chunk of the
owner's batch with base, contributors and the digest of its codes, and which contributions it was
made of; the codes that follow may be those of some chunks only (`carried`). The digest of a chunk's
codes is the root over its leaves (protocol/fragment/code_tree.py).

What is about a group carries its digest (group.py); so does what an owner signs.

The rules of audits, averages that are worked out again, are in protocol/diloco/audits.py; what
openings and evidence are is in evidence.py beside it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Final, Self

import blake3
import msgpack

from protocol.fragment.chunk_ledger import ResultRank, Stamp
from protocol.limits import (
    MAX_CHUNKS_PER_FRAGMENT,
    MAX_CONTRIBUTION_WEIGHT,
    MAX_CONTRIBUTORS,
    MAX_FRAGMENTS,
)
from protocol.membership.records import Verify, verify_with_peer_id
from protocol.plausible import NO_LENGTH

from .fields import Binary, Bits, Count, Digest, Integer, Many, PeerIdText, Real, Record

DOMAIN: Final = b"loco/v1/fragment-result\0"
CONTRIBUTION_DOMAIN: Final = b"loco/v1/fragment-contribution\0"
DIGEST_BYTES: Final = 16

_CHUNK: Final = Integer(0, MAX_CHUNKS_PER_FRAGMENT - 1)
_WEIGHT: Final = Integer(1, MAX_CONTRIBUTION_WEIGHT)

FragmentIndex = Annotated[int, Integer(0, MAX_FRAGMENTS - 1)]
ChunkIndex = Annotated[int, _CHUNK]
Chunks = Annotated[tuple[int, ...], Many(_CHUNK, MAX_CHUNKS_PER_FRAGMENT)]
ShortDigest = Annotated[bytes, Binary(DIGEST_BYTES)]
ShortDigests = Annotated[tuple[bytes, ...], Many(Binary(DIGEST_BYTES), MAX_CHUNKS_PER_FRAGMENT)]
Lengths = Annotated[tuple[float, ...], Many(Real(0.0, NO_LENGTH), MAX_CHUNKS_PER_FRAGMENT)]
Signature = Annotated[bytes, Binary(64)]
Weight = Annotated[int, Integer(0, MAX_CONTRIBUTION_WEIGHT)]
Mask = Annotated[bytes, Bits(MAX_CONTRIBUTORS)]


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
        digests: of the codes of each chunk, in the order of `stamps`.
        lengths: of the vectors that they stand for, per value; NO_LENGTH for what is longer.
        signature: the sender's.
    """

    group: Digest
    fragment: FragmentIndex
    cycle: Count
    weight: Weight
    steps: Count
    tokens: Count
    stamps: ChunkStamps
    digests: ShortDigests
    lengths: Lengths
    signature: Signature

    @property
    def statement(self) -> bytes:
        """The digest of what the sender signs; names this contribution in results."""
        return blake3.blake3(contribution_bytes(self)).digest(length=DIGEST_BYTES)

    def place(self, chunk: int) -> int | None:
        """Where a chunk stands in `stamps`, `digests` and `lengths`; None if it is not there."""
        named = (place for place, stamp in enumerate(self.stamps) if stamp.chunk == chunk)
        return next(named, None)

    def length(self, chunk: int) -> float:
        """What is told of the length of the codes of a chunk, which is there."""
        place = self.place(chunk)
        assert place is not None
        return self.lengths[place]

    def is_genuine(self, sender: str, verify: Verify = verify_with_peer_id) -> bool:
        """Whether this peer has signed it, and it makes sense."""
        fits = len(self.stamps) == len(self.digests) == len(self.lengths)
        return fits and verify(sender, contribution_bytes(self), self.signature)


def contribution_bytes(contribution: Contribution) -> bytes:
    """What the sender signs."""
    body = (
        contribution.group,
        contribution.fragment,
        contribution.cycle,
        contribution.weight,
        contribution.steps,
        contribution.tokens,
        [(each.chunk, each.steps, each.weight, each.digest) for each in contribution.stamps],
        contribution.digests,
        [float(length) for length in contribution.lengths],
    )
    packed: bytes = msgpack.packb(body)
    return CONTRIBUTION_DOMAIN + packed


def signed_contribution(unsigned: Contribution, sign: Callable[[bytes], bytes]) -> Contribution:
    """The same, under its sender's signature."""
    return replace(unsigned, signature=sign(contribution_bytes(unsigned)))


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The average of one chunk.

    Attributes:
        steps, weight, base: the stamp that it is to be applied to.
        mask: who is in it; bit i stands for the i-th of the result's contributors (`mask_of`).
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

    @property
    def places(self) -> tuple[int, ...]:
        """Places of those who are in it among the result's contributors, in order."""
        bits = int.from_bytes(self.mask, "little")
        return tuple(place for place in range(bits.bit_length()) if bits >> place & 1)


def mask_of(places: Iterable[int]) -> bytes:
    """The mask of those of a result's contributors that stand at these places; not of none."""
    bits = sum(1 << place for place in set(places))
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


@dataclass(frozen=True, slots=True)
class Result:
    """What an owner made of the contributions to its chunks; the codes of `carried` follow.

    Attributes:
        incarnation: the life of the owner that signs it; each signs one for a fragment and cycle.
        contributors: peer ids, sorted.
        weights: of each of them.
        statements: of each of them, the digest of its contribution.
        signature: the owner's, over all but `carried`.
    """

    group: Digest
    fragment: FragmentIndex
    cycle: Count
    owner: PeerIdText
    incarnation: Count
    contributors: Annotated[tuple[str, ...], Many(PeerIdText.__metadata__[0], MAX_CONTRIBUTORS)]
    weights: Annotated[tuple[int, ...], Many(_WEIGHT, MAX_CONTRIBUTORS)]
    statements: Annotated[tuple[bytes, ...], Many(Binary(DIGEST_BYTES), MAX_CONTRIBUTORS)]
    chunks: Annotated[tuple[ChunkResult, ...], Many(Record(ChunkResult), MAX_CHUNKS_PER_FRAGMENT)]
    carried: Chunks
    signature: Signature

    def chunk(self, index: int) -> ChunkResult | None:
        """What is said of a chunk, if anything."""
        return next((chunk for chunk in self.chunks if chunk.chunk == index), None)

    def contributors_of(self, chunk: ChunkResult) -> tuple[str, ...]:
        """The peers that are in the average of a chunk."""
        return tuple(self.contributors[place] for place in chunk.places)

    def outcome(self, chunk: ChunkResult) -> ResultRank:
        """What the ledger compares."""
        return ResultRank(sum(self.weights[place] for place in chunk.places), chunk.digest)

    def is_genuine(self, verify: Verify = verify_with_peer_id) -> bool:
        """Whether the owner has signed it, and it makes sense."""
        known = len(self.contributors)
        fits = len(self.weights) == len(self.statements) == known == len(set(self.contributors))
        fits = fits and all(chunk.places[-1] < known for chunk in self.chunks)
        return fits and verify(self.owner, signed_bytes(self), self.signature)


def signed_bytes(result: Result) -> bytes:
    """What the owner signs."""
    body = (
        result.group,
        result.fragment,
        result.cycle,
        result.owner,
        result.incarnation,
        result.contributors,
        result.weights,
        result.statements,
        [(c.chunk, c.steps, c.weight, c.base, c.mask, c.digest) for c in result.chunks],
    )
    packed: bytes = msgpack.packb(body)
    return DOMAIN + packed


def signed_result(unsigned: Result, sign: Callable[[bytes], bytes]) -> Result:
    """The same, under its owner's signature."""
    return replace(unsigned, signature=sign(signed_bytes(unsigned)))


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


# --- audits ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class GetOpening:
    """Show me this leaf of all that your result for this chunk was made of."""

    group: Digest
    fragment: FragmentIndex
    cycle: Count
    chunk: ChunkIndex
    leaf: Annotated[int, Integer(0, (1 << 32) - 1)]


@dataclass(frozen=True, slots=True)
class Opening:
    """Answer to GetOpening: the contributions, each with its leaf, follow."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """The owner of this result does not open it to the sender; see for yourselves."""

    group: Digest
    fragment: FragmentIndex
    cycle: Count
    owner: PeerIdText


@dataclass(frozen=True, slots=True)
class Proof:
    """The owner has lied: a result, and what shows that it does not follow from what it names."""

    group: Digest
    owner: PeerIdText


AuditMessage = GetOpening | Opening | Doubt | Proof
AUDIT_TYPES: Final[dict[str, type[AuditMessage]]] = {
    "get_opening": GetOpening,
    "opening": Opening,
    "doubt": Doubt,
    "proof": Proof,
}
