"""What an owner opens of a result, and what convicts it: proofs that travel.

    opening         msgpack [[contribution, leaf, path], ...], in the order of the contributors
    evidence        msgpack [result, chunk, leaf index, its codes, path, opening]
    contradiction   msgpack [result, result]

Evidence is one leaf of a result and of all that it was made of. Contributions and results are those
of the wire, signed. The statements that the result names, the roots in them and the paths tie each
leaf to a signature, so nobody can make an opening of anything but what the contributors have sent;
and the root in the result ties the owner to its average.

Whether the average follows is a matter of arithmetic (peer/averaging/diloco/fragment_audits.py).

A contradiction is two results that one owner has signed, of which one life of it can have signed
but one. An owner averages a cycle of a fragment once (owner.py: a collection that is over is not
opened again), and signs one result for all of its chunks. It has forgotten that when it is started
again, and may then sign another; so a result names the life that signed it, and of each life there
is one result for a fragment and cycle. Two that differ show that the owner told peers different
things, whatever went into them: no audit is needed, and both may follow from what they name.
"""

from dataclasses import dataclass
from typing import Any, Self

import msgpack
from msgspec.structs import replace

from protocol.errors import RemoteProtocolError
from protocol.fragment.code_tree import is_leaf
from protocol.limits import MAX_CONTRIBUTORS, MAX_EVIDENCE_BYTES
from protocol.plausible import contribution_shares
from protocol.wire.fragment_messages import ChunkResult, Contribution, Result, signed_bytes
from protocol.wire.messages import decode_message, encode_message


# --- evidence -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Input:
    """One contribution to a chunk, and one leaf of its codes."""

    contribution: Contribution
    codes: bytes
    path: bytes


@dataclass(frozen=True, slots=True)
class Leaf:
    """Which leaf of which chunk of a result is looked at, and of how many."""

    result: Result
    chunk: int
    index: int
    count: int

    @property
    def of_chunk(self) -> ChunkResult:
        """What the result says of the chunk. Raises RemoteProtocolError: nothing."""
        if (found := self.result.chunk(self.chunk)) is None:
            raise RemoteProtocolError(f"a result that says nothing of chunk {self.chunk}")
        return found


@dataclass(frozen=True, slots=True)
class Checked:
    """What was opened as it must be: all that the average of a leaf follows from.

    Attributes:
        codes, weights, shares: of each contribution, in the order of the sum.
    """

    codes: tuple[bytes, ...]
    weights: tuple[int, ...]
    shares: tuple[float, ...]


def pack_opening(inputs: list[Input]) -> bytes:
    """The bytes of an opening."""
    packed: bytes = msgpack.packb(
        [[encode_message(each.contribution), each.codes, each.path] for each in inputs]
    )
    return packed


def check_opening(leaf: Leaf, opening: bytes) -> Checked:
    """What the leaf of a result, which is genuine, was made of.

    Raises:
        RemoteProtocolError: this is not what the result names; nothing follows from it.
    """
    result, of_chunk = leaf.result, leaf.of_chunk
    inputs = [_input(each) for each in unpacked(opening, MAX_CONTRIBUTORS)]
    if len(inputs) != len(of_chunk.places):
        raise RemoteProtocolError("an opening of another number of contributions")
    lengths, weights = [], []
    for each, place in zip(inputs, of_chunk.places, strict=True):
        at = _place(leaf, each, result.contributors[place], result.statements[place])
        lengths.append(each.contribution.lengths[at])
        weights.append(result.weights[place])
    shares = contribution_shares(lengths)
    return Checked(tuple(each.codes for each in inputs), tuple(weights), tuple(shares))


def _place(leaf: Leaf, found: Input, sender: str, statement: bytes) -> int:
    """Where the chunk stands in a contribution, all of which is as the result names it."""
    message, result, of_chunk = found.contribution, leaf.result, leaf.of_chunk
    about = message.group, message.fragment, message.cycle
    if message.statement != statement or about != (result.group, result.fragment, result.cycle):
        raise RemoteProtocolError("an opening of contributions that the result does not name")
    if not message.is_genuine(sender):
        raise RemoteProtocolError("a contribution that its sender has not signed")
    place = message.place(leaf.chunk)
    if place is None or message.stamps[place] != of_chunk.base_stamp:
        raise RemoteProtocolError("a contribution to another chunk, or to another state of it")
    if not is_leaf(found.codes, leaf.index, leaf.count, found.path, message.digests[place]):
        raise RemoteProtocolError("a leaf that is not of its contribution")
    return place


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is to show that an owner has lied.

    Attributes:
        codes, path: of the leaf of the result.
    """

    result: Result
    chunk: int
    index: int
    codes: bytes
    path: bytes
    opening: bytes

    def packed(self) -> bytes:
        """Its bytes."""
        header = encode_message(replace(self.result, carried=()))
        body = [header, self.chunk, self.index, self.codes, self.path, self.opening]
        packed: bytes = msgpack.packb(body)
        return packed

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Evidence as it came. Raises RemoteProtocolError: it is none."""
        match unpacked(data, 6):
            case [bytes(header), int(chunk), int(index), bytes(codes), bytes(path), bytes(opening)]:
                result = decode_message(header)
                if isinstance(result, Result):
                    return cls(result, chunk, index, codes, path, opening)
        raise RemoteProtocolError("not evidence of anything")

    def checked(self, count: int) -> Checked:
        """What the leaf must follow from.

        Args:
            count: leaves of the chunk.

        Raises:
            RemoteProtocolError: the result does not name this; nothing follows from it.
        """
        leaf = Leaf(self.result, self.chunk, self.index, count)
        if not self.result.is_genuine():
            raise RemoteProtocolError("evidence of a result that its owner has not signed")
        if not is_leaf(self.codes, self.index, count, self.path, leaf.of_chunk.digest):
            raise RemoteProtocolError("evidence of a leaf that is not of its result")
        return check_opening(leaf, self.opening)


def _input(packed: Any) -> Input:
    match packed:
        case [bytes(header), bytes(codes), bytes(path)]:
            message = decode_message(header)
            if isinstance(message, Contribution):
                return Input(message, codes, path)
    raise RemoteProtocolError("not an opened contribution")


def unpacked(data: bytes, max_items: int) -> list[Any]:
    """A list of a stranger's. Raises RemoteProtocolError: it is none."""
    try:
        found = msgpack.unpackb(
            data, max_map_len=0, max_ext_len=0, max_array_len=max_items, max_bin_len=len(data)
        )
    except Exception as error:  # whatever a stranger's bytes may do to the decoder
        raise RemoteProtocolError(f"not an opening, and no evidence: {error}") from error
    if not isinstance(found, list) or len(data) > MAX_EVIDENCE_BYTES:
        raise RemoteProtocolError("not an opening, and no evidence")
    return found


# --- contradictions -------------------------------------------------------------------------------
def contradict(one: Result, other: Result) -> bool:
    """Whether one life of an owner cannot have signed both."""
    about, of = ((r.group, r.fragment, r.cycle, r.owner, r.incarnation) for r in (one, other))
    return about == of and signed_bytes(one) != signed_bytes(other)


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two results of one owner that cannot both be honest."""

    one: Result
    other: Result

    @property
    def result(self) -> Result:
        """Either of them, for what both are about."""
        return self.one

    def packed(self) -> bytes:
        """Its bytes."""
        body = [encode_message(replace(each, carried=())) for each in (self.one, self.other)]
        packed: bytes = msgpack.packb(body)
        return packed

    @classmethod
    def of(cls, headers: tuple[bytes, bytes]) -> Self:
        """What two headers tell. Raises RemoteProtocolError: they are not results."""
        one, other = map(decode_message, headers)
        if isinstance(one, Result) and isinstance(other, Result):
            return cls(one, other)
        raise RemoteProtocolError("a contradiction of other things than results")

    def check(self) -> None:
        """Raises RemoteProtocolError: this does not show that the owner has lied."""
        if not contradict(self.one, self.other):
            raise RemoteProtocolError("two results that do not contradict each other")
        if not (self.one.is_genuine() and self.other.is_genuine()):
            raise RemoteProtocolError("a contradiction that its owner has not signed")


def read_proof(data: bytes) -> Evidence | Contradiction:
    """A proof as it came, of either kind. Raises RemoteProtocolError: it is none."""
    match unpacked(data, 6):
        case [bytes(one), bytes(other)]:
            return Contradiction.of((one, other))
        case _:
            return Evidence.read(data)
