"""What an owner opens is what it was sent, and shows whether its average follows from that."""

from dataclasses import replace

import msgpack
import pytest
import torch
from msgspec import structs
from owner_worlds import (
    CYCLE,
    FRAGMENT,
    GROUP,
    contribution,
    outer_copy,
)

from peer.averaging.diloco.averages import ChunkAverages, audit, check_evidence, opening_of
from peer.averaging.diloco.fragment_messages import signed_with
from peer.averaging.diloco.outer_fragments import OuterFragments
from peer.codec import (
    code_digest,
    codes_as_tensor,
    leaf_digests,
    leaf_of,
    leaves_of_chunk,
    values_of_leaf,
)
from peer.network.identity import Identity
from protocol.diloco.audits import Evidence, Leaf, read_proof
from protocol.diloco.commands import Admitted, Average
from protocol.errors import RemoteProtocolError
from protocol.fragment.leaf_tree import path_of
from protocol.outcomes import AuditOutcome
from protocol.run.ways import CODECS
from protocol.wire.fragment_messages import Contribution, Result, signed_result

IDENTITIES = [Identity(bytes([n]) * 32) for n in range(1, 8)]
IDS = [identity.peer_id for identity in IDENTITIES]
CHUNK, OWNER = 1, 0
VALUES = {0: 1.0, 1: 2.5, 2: -40.0}
"""How long the contribution of each peer is; the last one is clipped."""
MANY = {peer: 1.0 + peer for peer in range(7)}
"""So many that values are left out."""


def sent_by(
    outer: OuterFragments, peer: int, cycle: int = CYCLE, length: float | None = None
) -> tuple[Contribution, memoryview]:
    """Noise as long as this peer's values are, signed."""
    like, codes = contribution(outer, {CHUNK: 0.0}, cycle=cycle)
    room = memoryview(bytearray(codes))
    generator = torch.Generator().manual_seed(peer)
    noise = torch.randn(outer.chunk_values(FRAGMENT, CHUNK), generator=generator)
    outer.codec.encode((VALUES[peer] if length is None else length) * noise, codes_as_tensor(room))
    return signed_with(like, {CHUNK: room}, outer, IDENTITIES[peer].sign), room


class Owner:
    """A result of three contributions, true or not, and what its owner opens."""

    def __init__(self, codec: str = "int8", *, lies: bool = False, trims: bool = False) -> None:
        self.trims = trims
        self.outer = outer_copy(codec)
        self.codec, self.size = self.outer.codec, self.outer.chunk_values(FRAGMENT, CHUNK)
        lengths = MANY if trims else VALUES
        sent = {IDS[p]: sent_by(self.outer, p, length=lengths[p]) for p in lengths}
        codes = {peer: each for peer, (_, each) in sent.items()}
        messages = {peer: message for peer, (message, _) in sent.items()}
        base = self.outer.first_stamps()[FRAGMENT][CHUNK]
        admitted = {CHUNK: Admitted(base, tuple(sorted(codes)))}
        self.order = Average(FRAGMENT, CYCLE, admitted, {CHUNK: codes}, messages)
        averages = ChunkAverages(
            GROUP, IDS[OWNER], 1, self.outer, IDENTITIES[OWNER].sign, trims=trims
        )
        made = averages.averaged(self.order)
        assert made is not None
        self.codes, self.result = made.parts[CHUNK], made.result
        if lies:
            self.codes = codes[IDS[1]]
            self.result = self.signed(code_digest(self.codec, self.codes))

    def signed(self, digest: bytes) -> Result:
        (of_chunk,) = self.result.chunks
        unsigned = structs.replace(self.result, chunks=(structs.replace(of_chunk, digest=digest),))
        return signed_result(unsigned, IDENTITIES[OWNER].sign)

    def leaf(self, index: int = 3) -> Leaf:
        return Leaf(self.result, CHUNK, index, leaves_of_chunk(self.size))

    def opening(self, index: int = 3) -> bytes:
        names = self.result.contributors_of(self.result.chunks[0])
        inputs = [(self.order.contributions[p], self.order.codes[CHUNK][p]) for p in names]
        return opening_of(self.codec, index, inputs)

    def audit(self, opening: bytes, index: int = 3) -> tuple[AuditOutcome, bytes]:
        return audit(self.codec, self.size, self.leaf(index), self.codes, opening, trims=self.trims)


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_every_leaf_of_a_true_average_follows(codec, trims):
    owner = Owner(codec, trims=trims)
    for index in range(leaves_of_chunk(owner.size)):
        assert owner.audit(owner.opening(index), index) == (AuditOutcome.TRUE, b"")


def evidence_in(proof: bytes) -> Evidence:
    found = read_proof(proof)
    assert isinstance(found, Evidence)
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_a_lie_is_proved_to_whoever_gets_the_proof(codec):
    owner = Owner(codec, lies=True)
    outcome, proof = owner.audit(owner.opening())
    assert outcome is AuditOutcome.LIE
    check_evidence(owner.codec, owner.size, evidence_in(proof), trims=owner.trims)


def test_an_opening_of_anything_else_opens_nothing():
    owner, other = Owner(), Owner()
    names = owner.result.contributors_of(owner.result.chunks[0])
    inputs = [(owner.order.contributions[p], owner.order.codes[CHUNK][p]) for p in names]
    later, _ = sent_by(owner.outer, 0, CYCLE + 1)
    forged = structs.replace(inputs[0][0], tokens=2)
    for wrong in (
        b"",
        b"\xc0",
        msgpack.packb([1, 2, 3]),
        opening_of(owner.codec, 3, inputs[1:]),
        opening_of(owner.codec, 3, inputs[::-1]),
        opening_of(owner.codec, 2, inputs),
        opening_of(owner.codec, 3, [(later, inputs[0][1]), *inputs[1:]]),
        opening_of(owner.codec, 3, [(forged, inputs[0][1]), *inputs[1:]]),
        opening_of(owner.codec, 3, [(inputs[0][0], inputs[1][1]), *inputs[1:]]),
        other.opening()[:-1],
    ):
        assert owner.audit(wrong) == (AuditOutcome.UNOPENED, b"")


def test_a_proof_against_an_owner_that_was_true_is_none():
    owner = Owner()
    leaves = leaf_digests(owner.codec, owner.codes)
    codes, path = leaf_of(owner.codec, owner.codes, 3), path_of(leaves, 3)
    true = Evidence(owner.result, CHUNK, 3, codes, path, owner.opening())
    other = leaf_of(owner.codec, owner.order.codes[CHUNK][IDS[1]], 3)
    for found, sentence in (
        (true, "average follows"),
        (replace(true, codes=other), "not of its result"),
        (replace(true, result=structs.replace(owner.result, cycle=CYCLE + 1)), "not signed"),
        (replace(true, chunk=0), "says nothing of chunk 0"),
        (replace(true, opening=owner.opening(2)), "not of its contribution"),
    ):
        with pytest.raises(RemoteProtocolError, match=sentence):
            check_evidence(owner.codec, owner.size, evidence_in(found.packed()), trims=owner.trims)


@pytest.mark.parametrize(
    "data", [b"", b"\xc0", b"\xff" * 99, msgpack.packb([b"", 0, 0, b"", b"", b""])]
)
def test_bytes_that_are_no_evidence_are_refused(data):
    with pytest.raises(RemoteProtocolError):
        read_proof(data)


def test_a_proof_survives_its_packing():
    owner = Owner(lies=True)
    _, proof = owner.audit(owner.opening())
    assert read_proof(proof).packed() == proof
    assert values_of_leaf(owner.size, 3) == 1024
