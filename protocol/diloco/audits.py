"""Audits: averages that are worked out again, and what follows for owners that lie.

Idea. Each contribution is signed by its sender; an owner signs the average, and names the
contributions that it was made of. So an owner can be asked to *open* its result: to show what went
in. One leaf of one chunk is enough (leaf_tree.py): a lie that moves a chunk is in most of its
leaves, and a leaf of all contributions is small beside the chunk. The auditor works out the average
of that leaf from the opening, bit for bit, and compares.

    owner     Result (signed; names the contributions) ------------> all
    auditor   GetOpening(chunk, leaf) -> owner;  Opening: contributions, each with its leaf
              the same: true | another: a lie, proved -> Proof to all | none: Doubt to all
    all       a Proof convinces all who check it;  after a Doubt each asks for itself

What is signed. A contribution: group, fragment, cycle, weight, the chunks with the states that they
stand on, and of each the root over its codes and its length. A result: the same of what came out,
its contributors, and the digest of each one's signed contribution. How much contributions count
follows from their lengths alone (protocol/plausible.py), which owners hold against the codes before
they take them: nothing has to be known of a chunk beyond the leaf.

What travels:

    opening         msgpack [[contribution, leaf, path], ...], in the order of the contributors
    evidence        msgpack [result, chunk, leaf index, its codes, path, opening]
    contradiction   msgpack [result, result]

Evidence and contradictions are *proofs*. The statements that a result names, the roots in them and
the paths tie each leaf to a signature, so nobody can open anything but what the contributors have
sent; the root in the result ties the owner to its average. The arithmetic is in
peer/averaging/diloco/averages.py.

Rules
  1. Each peer that gets a result from its owner draws, with randomness of its own, whether to audit
     it, and which chunk and leaf of it; so that about AUDITS_PER_RESULT of all do. Nobody else can
     know beforehand. An owner keeps what it has averaged for as long as it is likely to be asked.
  2. A leaf that does not follow from the contributions that the result names is a *lie*, and the
     opening is its proof. The proof goes to all, and to newcomers; each that checks it bans the
     owner, and takes back what it has averaged (rule 4).
  3. An owner that is there, is asked and does not open, in time or at all, is not believed in that
     result. That proves nothing to others: they are told of the doubt, and ask for themselves. If
     the owner has gone the audit is inconclusive.
  4. A result that is not believed is not applied, and is undone while the state before is kept
     (chunk_ledger.py). The chunk has no step in that cycle then, as if its owner had died. Such a
     state is not taken back from others in that cycle.
  5. Nobody is blamed for a doubt: lines and processes fail. Doubts about a result are followed up
     once, MAX_AUDITS at once.
  6. Two different results that one life of an owner has signed for a fragment and cycle are a
     proof, whatever went into them: an owner averages a cycle once (collecting.py) and signs one
     result for all its chunks. An owner that was started again has forgotten that; therefore a
     result names the life that signed it, and one that its owner itself sends must name the life
     that we know. Peers that were told different things see that they differ when they are through
     with the cycle, and ask each other for the results. Of each fragment and owner the newest two
     are kept for that.

Why nobody honest is convicted. An owner signs what it averages, and nothing twice in a life. One
that has started again has nothing to open, which is no lie. Views that differ make two owners of
one chunk, each with its own contributions, each true.

Not seen: a lie in so few leaves that none is drawn; two results of an owner that tells each of two
peers another incarnation; and contributions that are longer than they say, where the owner is in
league with their sender. The first and the last move a chunk within what is plausible.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import blake3
import msgspec
from msgspec import Meta
from msgspec.structs import replace

from protocol.errors import RemoteProtocolError
from protocol.fragment.leaf_tree import is_leaf
from protocol.limits import (
    MAX_AUDITS,
    MAX_CONTRIBUTORS,
    MAX_EVIDENCE_BYTES,
    MAX_KEPT_EVIDENCE_BYTES,
    MAX_REMEMBERED,
    forget_oldest,
)
from protocol.outcomes import AuditOutcome
from protocol.plausible import contribution_shares
from protocol.wire.fragment_messages import (
    ChunkResult,
    Contribution,
    Doubt,
    Proof,
    Result,
    signed_bytes,
)
from protocol.wire.messages import decode_message, encode_message

from .commands import Audit, Codes, Convict
from .peers import Context

AUDITS_PER_RESULT: Final = 2.0
"""How many of the others audit a result, on the average: with one, two lies of five are not seen
(docs/results/hostile.md)."""


# --- openings -------------------------------------------------------------------------------------
PackedLeaf = tuple[bytes, bytes, bytes]
"""A contribution, its leaf, and the leaf's path."""
_Opened = Annotated[list[PackedLeaf], Meta(max_length=MAX_CONTRIBUTORS)]
_Proof = Annotated[list[bytes | int], Meta(max_length=6)]
OpenedLeaf = tuple[bytes, float]
"""The codes of one contribution's leaf, and how much they count."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One of `count` leaves of a chunk of a result."""

    result: Result
    chunk: int
    index: int
    count: int

    @property
    def of_chunk(self) -> ChunkResult:
        """Raises RemoteProtocolError: the result says nothing of the chunk."""
        if (found := self.result.chunk(self.chunk)) is None:
            raise RemoteProtocolError(f"a result that says nothing of chunk {self.chunk}")
        return found


def pack_opening(opened: Iterable[tuple[Contribution, bytes, bytes]]) -> bytes:
    return msgspec.msgpack.encode([(encode_message(of), codes, path) for of, codes, path in opened])


def check_opening(leaf: Leaf, opening: bytes) -> list[OpenedLeaf]:
    """The contributions to the leaf of a genuine result, in the order of the sum.

    Raises RemoteProtocolError: it is not what the result names; nothing follows from it.
    """
    opened: list[PackedLeaf] = _unpacked(opening, _Opened)
    places = leaf.of_chunk.places
    if len(opened) != len(places):
        raise RemoteProtocolError("an opening of another number of contributions")
    leaves = [_opened(leaf, each, place) for each, place in zip(opened, places, strict=True)]
    shares = contribution_shares([length for _, length in leaves])
    return [(codes, share) for (codes, _), share in zip(leaves, shares, strict=True)]


def _opened(leaf: Leaf, packed: PackedLeaf, contributor: int) -> tuple[bytes, float]:
    """The codes of a contribution's leaf, and its length."""
    header, codes, path = packed
    message = decode_message(header)
    if not isinstance(message, Contribution):
        raise RemoteProtocolError("not an opened contribution")
    result, of_chunk = leaf.result, leaf.of_chunk
    about = message.group, message.fragment, message.cycle
    is_named = message.statement == result.statements[contributor]
    if not is_named or about != (result.group, result.fragment, result.cycle):
        raise RemoteProtocolError("an opening of contributions that the result does not name")
    if not message.is_genuine(result.contributors[contributor]):
        raise RemoteProtocolError("a contribution that its sender has not signed")
    place = message.place(leaf.chunk)
    if place is None or message.stamps[place] != of_chunk.base_stamp:
        raise RemoteProtocolError("a contribution to another chunk, or to another state of it")
    if not is_leaf(codes, leaf.index, leaf.count, path, message.digests[place]):
        raise RemoteProtocolError("a leaf that is not of its contribution")
    return codes, message.lengths[place]


# --- proofs ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Evidence:
    """A leaf of a result, with its path, and of all that it was made of: it shows a lie."""

    result: Result
    chunk: int
    index: int
    codes: bytes
    path: bytes
    opening: bytes

    def packed(self) -> bytes:
        header = encode_message(replace(self.result, carried=()))
        body = [header, self.chunk, self.index, self.codes, self.path, self.opening]
        return msgspec.msgpack.encode(body)

    def checked(self, count: int) -> list[OpenedLeaf]:
        """The contributions that the leaf, one of `count` of the chunk, must follow from.

        Raises RemoteProtocolError: the result does not name this; nothing follows from it.
        """
        leaf = Leaf(self.result, self.chunk, self.index, count)
        if not self.result.is_genuine():
            raise RemoteProtocolError("evidence of a result that its owner has not signed")
        if not is_leaf(self.codes, self.index, count, self.path, leaf.of_chunk.digest):
            raise RemoteProtocolError("evidence of a leaf that is not of its result")
        return check_opening(leaf, self.opening)


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two results of one owner that cannot both be honest (rule 6)."""

    result: Result
    other: Result

    def packed(self) -> bytes:
        body = [encode_message(replace(each, carried=())) for each in (self.result, self.other)]
        return msgspec.msgpack.encode(body)

    def check(self) -> None:
        """Raises RemoteProtocolError: this does not show that the owner has lied."""
        if not contradict(self.result, self.other):
            raise RemoteProtocolError("two results that do not contradict each other")
        if not (self.result.is_genuine() and self.other.is_genuine()):
            raise RemoteProtocolError("a contradiction that its owner has not signed")


def contradict(one: Result, other: Result) -> bool:
    """Whether one life of an owner cannot have signed both."""
    about, of = ((r.group, r.fragment, r.cycle, r.owner, r.incarnation) for r in (one, other))
    return about == of and signed_bytes(one) != signed_bytes(other)


def read_proof(data: bytes) -> Evidence | Contradiction:
    """Decode a proof. Raises RemoteProtocolError: it is not one."""
    match _unpacked(data, _Proof):
        case [bytes(one), bytes(other)]:
            return Contradiction(_result(one), _result(other))
        case [bytes(header), int(chunk), int(index), bytes(codes), bytes(path), bytes(opening)]:
            return Evidence(_result(header), chunk, index, codes, path, opening)
    raise RemoteProtocolError("not evidence of anything")


def _result(header: bytes) -> Result:
    message = decode_message(header)
    if not isinstance(message, Result):
        raise RemoteProtocolError("a proof of other things than results")
    return message


def _unpacked(data: bytes, kind: Any) -> Any:
    """Decode a list from a stranger. Raises RemoteProtocolError."""
    if len(data) > MAX_EVIDENCE_BYTES:
        raise RemoteProtocolError("not an opening, and no evidence")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"not an opening, and no evidence: {error}") from error


# --- audits ---------------------------------------------------------------------------------------
Key = tuple[int, int, str]
"""Fragment, cycle and owner of a result."""


class Audits:
    """The audits of one peer; which owners it no longer believes, its `Peers` know."""

    def __init__(self, context: Context, seed: bytes) -> None:
        self._context = context
        self._group = context.plan.group
        self._peers = context.peers
        self._seed = seed
        self._under_way: set[Key] = set()
        self._results: dict[Key, tuple[Result, Codes]] = {}
        self._signed: dict[tuple[int, str], list[Result]] = {}

    def is_convicted(self, owner: str) -> bool:
        return owner in self._peers.liars

    # --- what is audited --------------------------------------------------------------------------
    def arrived(self, result: Result, codes: Codes) -> None:
        """A believed result came from its owner (rule 1)."""
        key = result.fragment, result.cycle, result.owner
        if key in self._peers.unopened or not codes:
            return
        # Of each fragment and owner the newest alone: the codes are kept until the next one.
        for older in [each for each in self._results if each[::2] == key[::2]]:
            del self._results[older]
        self._results[key] = result, codes
        forget_oldest(self._results, MAX_REMEMBERED)
        draw, _ = self._draw(key)
        if draw * max(1, len(self._peers.others)) < AUDITS_PER_RESULT:
            self._audit(key)

    def doubted(self, doubt: Doubt) -> None:
        """Another peer was not shown what a result was made of (rule 3)."""
        self._audit((doubt.fragment, doubt.cycle, doubt.owner))

    def _audit(self, key: Key) -> None:
        kept = self._results.get(key)
        known = key in self._peers.unopened or key in self._under_way
        if kept is None or known or len(self._under_way) >= MAX_AUDITS:
            return
        self._under_way.add(key)
        result, codes = kept
        _, number = self._draw(key)
        chunk = sorted(codes)[number % len(codes)]
        self._context.do(Audit(result, chunk, number // len(codes), codes[chunk]))

    def _draw(self, key: Key) -> tuple[float, int]:
        """A number between 0 and 1, and a large one; the same whenever this is asked."""
        digest = blake3.blake3(f"{key[0]}/{key[1]}/{key[2]}".encode(), key=self._seed).digest()
        return int.from_bytes(digest[:8], "big") / 2**64, int.from_bytes(digest[8:16], "big")

    def noted(self, result: Result) -> None:
        """Hold a genuine result against those that its owner has signed (rule 6)."""
        if result.owner not in self._peers.others:
            return
        key = result.fragment, result.owner
        kept = self._signed.pop(key, [])
        for each in kept:
            if contradict(each, result):
                self.proved(result.owner, Contradiction(each, result).packed())
                return
        if not any(_life(each) == _life(result) for each in kept):
            kept = sorted([*kept, result], key=_life)[-2:]
        self._signed[key] = kept
        forget_oldest(self._signed, MAX_REMEMBERED)

    # --- what comes of it -------------------------------------------------------------------------
    def audited(self, result: Result, outcome: AuditOutcome, proof: bytes) -> None:
        key = result.fragment, result.cycle, result.owner
        self._under_way.discard(key)
        if outcome is AuditOutcome.UNOPENED and result.owner not in self._peers.others:
            outcome = AuditOutcome.INCONCLUSIVE
        self._context.counts.audits[outcome] += 1
        if outcome is AuditOutcome.TRUE:
            self._results.pop(key, None)
        elif outcome is AuditOutcome.LIE:
            self.proved(result.owner, proof)
        elif outcome is AuditOutcome.UNOPENED and key not in self._peers.unopened:
            self._results.pop(key, None)
            self._peers.note_unopened(*key)
            self._to_all(Doubt(self._group, *key))

    def proved(self, owner: str, proof: bytes) -> None:
        """An owner has lied; it is proved, here or elsewhere (rule 2)."""
        liars = self._peers.liars
        if owner in liars or owner == self._peers.own_id:
            return
        has_room = sum(map(len, liars.values())) + len(proof) <= MAX_KEPT_EVIDENCE_BYTES
        self._results = {key: kept for key, kept in self._results.items() if key[2] != owner}
        self._peers.note_untrue(owner, proof if has_room else b"")
        self._context.do(Convict(owner, proof))
        self._to_all(Proof(self._group, owner), proof, but=owner)

    def tell(self, newcomer: str) -> None:
        """Tell a newcomer of the liars, as far as they can still be proved."""
        for owner, proof in self._peers.liars.items():
            if proof and owner != newcomer:
                self._context.tell(newcomer, Proof(self._group, owner), memoryview(proof))

    def _to_all(self, message: Doubt | Proof, proof: bytes = b"", but: str = "") -> None:
        for peer_id in sorted(self._peers.others - {but, message.owner}):
            self._context.tell(peer_id, message, memoryview(proof))


def _life(result: Result) -> tuple[int, int]:
    return result.cycle, result.incarnation
