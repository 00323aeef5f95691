"""Messages of `/loco/fragment/1`; the codec stands in messages.py.

Bulk goes one way: each peer opens one lasting stream to each other one for what it has to send, in
order: contributions to owners, results to all, its stamps when a cycle is over. Questions are asked
on streams of their own.

A contribution is signed by its sender: its owner can prove what it was sent, and with it that the
result follows from that (protocol/diloco/audits.py). A result is signed by its owner, so that
every peer that holds it can give it to one that lacks it: what is signed lists every chunk of the
owner's batch with base, contributors and the digest of its codes, and which contributions it was
made of; the codes that follow may be those of some chunks only (`carried`). The digest of a chunk's
codes is the root over its leaves (protocol/fragment/leaf_tree.py).

What is about a group carries its digest (protocol/membership/group.py); so does what an owner
signs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Final

import blake3
import msgspec
from msgspec import Meta, Struct
from msgspec.structs import astuple, replace

from protocol import limits
from protocol.membership.records import Verify, verify_with_peer_id
from protocol.plausible import NO_LENGTH

from .fields import Count, Digest, Message, PeerIdText, Signature

DOMAIN: Final = b"loco/v1/fragment-result\0"
CONTRIBUTION_DOMAIN: Final = b"loco/v1/fragment-contribution\0"
DIGEST_BYTES: Final = 16

OfChunks: Final = Meta(max_length=limits.MAX_CHUNKS_PER_FRAGMENT)
OfContributors: Final = Meta(max_length=limits.MAX_CONTRIBUTORS)

FragmentIndex = Annotated[int, Meta(ge=0, lt=limits.MAX_FRAGMENTS)]
ChunkIndex = Annotated[int, Meta(ge=0, lt=limits.MAX_CHUNKS_PER_FRAGMENT)]
Cycle = Annotated[int, Meta(ge=-1, le=limits.MAX_COUNT)]
ShortDigest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Length = Annotated[float, Meta(ge=0, le=NO_LENGTH)]
Weight = Annotated[int, Meta(ge=0, le=limits.MAX_CONTRIBUTION_WEIGHT)]
PositiveWeight = Annotated[int, Meta(ge=1, le=limits.MAX_CONTRIBUTION_WEIGHT)]


class Stamp(Struct, frozen=True):
    """The state of one chunk (protocol/diloco/chunk_ledger.py).

    Attributes:
        steps: outer steps that led to it.
        weight: admitted in all of them together.
        digest: of outer copy, momentum and the numbers above.
    """

    chunk: ChunkIndex
    steps: Count
    weight: Count
    digest: ShortDigest

    def is_ahead_of(self, other: "Stamp") -> bool:
        """Whether this state is ahead: more steps, then more weight."""
        return (self.steps, self.weight) > (other.steps, other.weight)


ChunkStamps = Annotated[tuple[Stamp, ...], OfChunks]


class OfFragment(Message, frozen=True):
    """About a fragment of a group, as most of these are."""

    group: Digest
    fragment: FragmentIndex


class OfCycle(OfFragment, frozen=True):
    """About one send of it."""

    cycle: Count


class Contribution(OfCycle, frozen=True, tag="contribution"):
    """The codes of those chunks that the receiver owns follow, in the order of `stamps`.

    Attributes:
        weight: 0 says that nothing will come (and no codes follow).
        steps, tokens: trained since the fragment's last send.
        stamps: what the codes are differences from.
        digests: of the codes of each chunk, in the order of `stamps`.
        lengths: of the vectors that they stand for, per value; NO_LENGTH for what is longer.
        signature: the sender's.
    """

    max_payload_bytes = limits.MAX_PAYLOAD_BYTES

    weight: Weight
    steps: Count
    tokens: Count
    stamps: ChunkStamps
    digests: Annotated[tuple[ShortDigest, ...], OfChunks]
    lengths: Annotated[tuple[Length, ...], OfChunks]
    signature: Signature

    @property
    def statement(self) -> bytes:
        """The digest of what the sender signs; names this contribution in results."""
        return blake3.blake3(contribution_bytes(self)).digest(length=DIGEST_BYTES)

    def place(self, chunk: int) -> int | None:
        """Where a chunk stands in `stamps`, `digests` and `lengths`, if it is there."""
        named = (place for place, stamp in enumerate(self.stamps) if stamp.chunk == chunk)
        return next(named, None)

    def length(self, chunk: int) -> float:
        """The length that is told of the codes of a chunk, which is there."""
        place = self.place(chunk)
        assert place is not None
        return self.lengths[place]

    def is_genuine(self, sender: str) -> bool:
        """Whether this peer has signed it, and it makes sense."""
        fits = len(self.stamps) == len(self.digests) == len(self.lengths)
        return fits and verify_with_peer_id(sender, contribution_bytes(self), self.signature)


def contribution_bytes(contribution: Contribution) -> bytes:
    """All fields but the signature, without their names: the sender signs these."""
    *plain, stamps, digests, lengths, _ = astuple(contribution)
    body = (*plain, list(map(astuple, stamps)), digests, list(map(float, lengths)))
    return CONTRIBUTION_DOMAIN + msgspec.msgpack.encode(body)


def signed_contribution(unsigned: Contribution, sign: Callable[[bytes], bytes]) -> Contribution:
    return replace(unsigned, signature=sign(contribution_bytes(unsigned)))


class ChunkResult(Struct, frozen=True):
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
    mask: Annotated[bytes, Meta(min_length=1, max_length=limits.MAX_CONTRIBUTORS // 8)]
    digest: ShortDigest

    def __post_init__(self) -> None:
        """Check that the mask is the only one of its set. Raises ValueError."""
        if not self.mask or not self.mask[-1]:
            raise ValueError("the mask ends with a zero byte")

    @property
    def base_stamp(self) -> Stamp:
        return Stamp(self.chunk, self.steps, self.weight, self.base)

    @property
    def rank(self) -> "ResultRank":
        """Its rank; each contributor weighs the same."""
        return ResultRank(len(self.places) * limits.MAX_CONTRIBUTION_WEIGHT, self.digest)

    @property
    def places(self) -> tuple[int, ...]:
        """Places of the chunk's contributors among the result's, in order."""
        bits = int.from_bytes(self.mask, "little")
        return tuple(place for place in range(bits.bit_length()) if bits >> place & 1)


def mask_of(places: Iterable[int]) -> bytes:
    """The mask of a result's contributors at these places, of which there is one at least."""
    bits = sum(1 << place for place in set(places))
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


@dataclass(frozen=True, slots=True)
class ResultRank:
    """The weight that went into a result for one chunk, and the digest of its codes."""

    weight: int
    digest: bytes

    def wins_over(self, other: "ResultRank") -> bool:
        """Whether it wins: by its weight, then by the lower digest."""
        return (-self.weight, self.digest) < (-other.weight, other.digest)


class Result(OfCycle, frozen=True, tag="result"):
    """An owner's averages of the contributions to its chunks; the codes of `carried` follow.

    Attributes:
        incarnation: the life of the owner that signs it; each signs one for a fragment and cycle.
        contributors: peer ids, sorted.
        weights: of each of them.
        statements: of each of them, the digest of its contribution.
        signature: the owner's, over all but `carried`.
    """

    max_payload_bytes = limits.MAX_PAYLOAD_BYTES

    owner: PeerIdText
    incarnation: Count
    contributors: Annotated[tuple[PeerIdText, ...], OfContributors]
    weights: Annotated[tuple[PositiveWeight, ...], OfContributors]
    statements: Annotated[tuple[ShortDigest, ...], OfContributors]
    chunks: Annotated[tuple[ChunkResult, ...], OfChunks]
    carried: Annotated[tuple[ChunkIndex, ...], OfChunks]
    signature: Signature

    def chunk(self, index: int) -> ChunkResult | None:
        return next((chunk for chunk in self.chunks if chunk.chunk == index), None)

    def contributors_of(self, chunk: ChunkResult) -> tuple[str, ...]:
        return tuple(self.contributors[place] for place in chunk.places)

    def is_genuine(self, verify: Verify = verify_with_peer_id) -> bool:
        """Whether the owner has signed it, and it makes sense."""
        known = len(self.contributors)
        fits = len(self.weights) == len(self.statements) == known == len(set(self.contributors))
        fits = fits and all(chunk.places[-1] < known for chunk in self.chunks)
        return fits and verify(self.owner, signed_bytes(self), self.signature)


def signed_bytes(result: Result) -> bytes:
    """All fields but `carried` and the signature, without their names: the owner signs these."""
    *plain, chunks, _, _ = astuple(result)
    return DOMAIN + msgspec.msgpack.encode((*plain, list(map(astuple, chunks))))


def signed_result(unsigned: Result, sign: Callable[[bytes], bytes]) -> Result:
    return replace(unsigned, signature=sign(signed_bytes(unsigned)))


class FragmentSettled(OfCycle, frozen=True, tag="fragment_settled"):
    """The sender has finished this cycle of the fragment; the digest is of all its stamps."""

    digest: ShortDigest


class NoResult(OfCycle, frozen=True, tag="no_result"):
    """The sender has nothing to give for its chunks of this cycle: do not wait for it."""


class GetStamps(OfFragment, frozen=True, tag="get_stamps"):
    """Which states are your chunks of this fragment in?"""


class Stamps(Message, frozen=True, tag="stamps"):
    """Answer to GetStamps: of each chunk, with the cycle of its last step (-1 before the first)."""

    fragment: FragmentIndex
    stamps: ChunkStamps
    cycles: Annotated[tuple[Cycle, ...], OfChunks]


class GetResult(OfCycle, frozen=True, tag="get_result"):
    """Send me the result that you applied to this chunk in this cycle."""

    chunk: ChunkIndex


class GetChunkState(OfFragment, frozen=True, tag="get_chunk_state"):
    """Send me this chunk as you have it."""

    chunk: ChunkIndex


class ChunkStateReply(Message, frozen=True, tag="chunk_state"):
    """Outer copy and momentum of a chunk follow, fp32; `cycle` is that of its last step."""

    max_payload_bytes = limits.MAX_PAYLOAD_BYTES

    fragment: FragmentIndex
    cycle: Cycle
    stamp: Stamp


# --- audits ---------------------------------------------------------------------------------------
class GetOpening(OfCycle, frozen=True, tag="get_opening"):
    """Show me this leaf of all that your result for this chunk was made of."""

    chunk: ChunkIndex
    leaf: Annotated[int, Meta(ge=0, lt=1 << 32)]


class Opening(Message, frozen=True, tag="opening"):
    """Answer to GetOpening: the contributions, each with its leaf, follow."""

    max_payload_bytes = limits.MAX_EVIDENCE_BYTES


class Doubt(OfCycle, frozen=True, tag="doubt"):
    """The owner of this result does not open it to the sender; see for yourselves."""

    owner: PeerIdText


class Proof(Message, frozen=True, tag="proof"):
    """The owner has lied: a result, and what shows that it does not follow from what it names."""

    max_payload_bytes = limits.MAX_EVIDENCE_BYTES

    group: Digest
    owner: PeerIdText
