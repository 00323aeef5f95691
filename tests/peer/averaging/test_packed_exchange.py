"""Exchanges of packed vectors: both average with the same numbers, whatever was read wrongly."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import blake3
import numpy as np
import pytest
import torch
import trio
from striped_worlds import (
    IDS,
    NAME,
    PARAMETERS,
    PIECE,
    Peer,
    agreement,
    contribution,
    real_peer,
    two_networks,
)

from peer.averaging.gossip import exchanges
from peer.averaging.gossip.exchange_session import Averaged, OwnVector, Skipped
from peer.averaging.gossip.packing import Packer
from peer.codec import get_codec
from peer.codec.differences import pack
from peer.facts import PackingFacts
from peer.network.conversation import Conversation
from protocol.errors import StreamLost
from protocol.gossip.exchange import map_of
from protocol.outcomes import SkipReason
from protocol.wire import pieces
from protocol.wire.messages import Accept, Blocks, Misread, Received, Vector
from protocol.wire.versions import GOSSIP
from simulation.work import SimulatedWork

CODEC = "int8-diff"
BLOCKS = PARAMETERS // 128


def values(seed: int, apart: float = 0.01) -> torch.Tensor:
    """Weights of a replica: near those of every other seed."""
    common = torch.randn(PARAMETERS, generator=torch.manual_seed(0))
    return common + apart * torch.randn(PARAMETERS, generator=torch.manual_seed(seed))


def vector(seed: int, x: torch.Tensor, vectors: int = 1, codec: str = CODEC) -> OwnVector:
    codes = np.empty(get_codec(codec).code_bytes(PARAMETERS), np.uint8)
    get_codec(codec).encode(x, torch.from_numpy(codes))
    payload = memoryview(codes.tobytes() * vectors)
    digest = blake3.blake3(payload).hexdigest(length=16)
    plain = contribution(seed)
    return replace(plain, payload=payload, digest=digest)


@dataclass
class Two:
    one: Peer
    two: Peer
    facts: tuple[PackingFacts, PackingFacts]
    rounds: int = 0

    async def exchange(self, ones: OwnVector, twos: OwnVector) -> int:
        """Average once; returns how many bytes went out on the gossip streams of both."""
        before = self._sent()
        self.rounds += 1
        for peer, brought in ((self.one, ones), (self.two, twos)):
            own = replace(brought, round=brought.round + self.rounds)
            peer.outcome, peer.own = None, own
            peer.scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.two.average, self.one.own)
            nursery.start_soon(self.one.average, self.two.own)
        for peer in (self.one, self.two):
            assert isinstance(peer.outcome, Averaged), peer.outcome
            await peer.gossip.packer.learn(peer.own.payload, peer.outcome.payload)
        return self._sent() - before

    def _sent(self) -> int:
        peers = (self.one, self.two)
        return sum(peer.network.statistics().sent_bytes.get(GOSSIP, 0) for peer in peers)

    def averaged(self) -> bool:
        """Whether each holds just what the other brought."""
        for peer, other in ((self.one, self.two), (self.two, self.one)):
            assert isinstance(peer.outcome, Averaged), peer.outcome
            if bytes(peer.outcome.payload) != bytes(other.own.payload):
                return False
        return True


@asynccontextmanager
async def two_peers(vectors: int = 1) -> AsyncIterator[Two]:
    agreed, facts = agreement(codec=CODEC, vectors=vectors), (PackingFacts(), PackingFacts())
    async with (
        two_networks() as (a, b),
        real_peer(a, 1, agreed=agreed, facts=facts[0]) as one,
        real_peer(b, 2, agreed=agreed, facts=facts[1]) as two,
    ):
        yield Two(one, two, facts)


@pytest.fixture(params=["one stream", "stripes"])
def streams(request, monkeypatch):
    """Both ways for a vector to travel."""
    if request.param == "stripes":
        monkeypatch.setattr(pieces, "PIECE_BYTES", PIECE)
        monkeypatch.setattr(exchanges, "PIECE_BYTES", PIECE)
        monkeypatch.setattr(exchanges, "STRIPE_FROM_BYTES", 2 * PIECE)
    return request.param


@pytest.mark.parametrize("vectors", [1, 2])
async def test_the_first_exchange_tells_how_far_apart_they_are_and_the_next_is_packed(
    autojump_clock, streams, vectors
):
    async with two_peers(vectors) as two:
        sizes = []
        for round_ in range(3):
            ours, theirs = (vector(seed, values(seed + 2 * round_), vectors) for seed in (1, 2))
            sizes.append(await two.exchange(ours, theirs))
            assert two.averaged()
        assert sizes[1] < 0.62 * sizes[0]
        assert sizes[2] < 0.62 * sizes[0]
        for facts in two.facts:
            assert (facts.plain, facts.packed, facts.whole) == (1, 2, 0)
            assert facts.blocks == 2 * BLOCKS * vectors
            assert facts.misread < 0.01 * facts.blocks
            assert facts.code_bytes == 3 * len(two.one.own.payload)
            assert 0.6 < facts.sent_bytes / facts.code_bytes < 0.75


@pytest.mark.parametrize("jump", [4, 30])
async def test_what_is_read_wrongly_is_sent_again(autojump_clock, streams, jump):
    """One has moved further than any exchange before would say."""
    async with two_peers() as two:
        await two.exchange(vector(1, values(1)), vector(2, values(2)))
        await two.exchange(vector(1, values(3, 0.01 * jump)), vector(2, values(4)))
        assert two.averaged()
        for facts in two.facts:
            assert 0 < facts.misread <= facts.blocks == BLOCKS
            assert facts.sent_bytes <= 2 * facts.code_bytes
        assert (two.facts[0].misread == BLOCKS) == (jump == 30)


async def test_a_part_that_jumped_alone_is_sent_again_alone(autojump_clock, streams):
    async with two_peers() as two:
        await two.exchange(vector(1, values(1)), vector(2, values(2)))
        moved = values(3)
        moved[: 5 * 128] *= -1
        await two.exchange(vector(1, moved), vector(2, values(4)))
        assert two.averaged()
        for facts in two.facts:
            assert 5 <= facts.misread <= 12


async def test_wrong_wraps_that_pass_the_sums_do_not_pass_the_digest(
    autojump_clock, streams, monkeypatch
):
    """Then all is sent again."""
    monkeypatch.setattr("peer.codec.differences._sums", _no_sums)
    async with two_peers() as two:
        await two.exchange(vector(1, values(1)), vector(2, values(2)))
        await two.exchange(vector(1, values(3, 0.04)), vector(2, values(4)))
        assert two.averaged()
        for facts in two.facts:
            assert facts.whole == 1


def _no_sums(codes, widths):
    return np.zeros((len(widths), 2), np.uint8)


async def test_int8_never_packs(autojump_clock):
    async with two_networks() as (a, b), real_peer(a, 1) as one, real_peer(b, 2):
        assert await one.gossip.packer.packed(one.own.payload) is None


# --- a partner that keeps to no rules -------------------------------------------------------------
@dataclass
class Liar:
    """Proposed to a real peer, and was accepted."""

    talk: Conversation
    peer: Peer
    own: OwnVector
    codec: str

    async def head(self, packed: int = 0) -> Vector:
        return Vector(NAME, 1, 1, self.codec, 1, self.own.digest, packed)

    async def hear_vector(self) -> Vector:
        head, payload = await self.talk.receive(Vector, max_payload_bytes=1 << 20)
        assert 0 < head.packed == len(payload) < len(self.own.payload)
        return head

    async def reason(self) -> SkipReason:
        """Why the real peer did not average with us."""
        while self.peer.outcome is None:
            await trio.sleep(0.1)
        assert isinstance(self.peer.outcome, Skipped)
        return self.peer.outcome.reason


@asynccontextmanager
async def liar(codec: str = CODEC) -> AsyncIterator[Liar]:
    agreed = agreement(codec=codec)
    async with (
        two_networks() as (a, b),
        real_peer(b, 2, agreed=agreed) as peer,
        trio.open_nursery() as nursery,
    ):
        own = vector(1, values(1), codec=codec)
        theirs = vector(2, values(2), codec=codec)
        await peer.gossip.packer.learn(theirs.payload, own.payload)
        peer.own = theirs
        nursery.start_soon(peer.average)
        await trio.sleep(0.1)
        talk = Conversation(await a.open_stream(IDS[1], GOSSIP))
        await talk.send(agreed.proposal(own))
        await talk.receive(Accept)
        yield Liar(talk, peer, own, codec)


async def test_a_reader_that_asks_for_all_gets_the_codes_once(autojump_clock):
    async with liar() as it:
        await it.talk.send(await it.head(), it.own.payload)
        head = await it.hear_vector()
        every = np.ones(BLOCKS, np.bool_)
        await it.talk.send(Misread(NAME), map_of(every))
        receipt, _ = await it.talk.receive(Received)
        assert receipt.digest == it.own.digest
        _, codes = await it.talk.receive(Blocks, max_payload_bytes=1 << 20)
        assert codes == bytes(it.peer.own.payload[:PARAMETERS])
        await it.talk.send(Received(NAME, head.digest))
        while it.peer.outcome is None:
            await trio.sleep(0.1)
        assert isinstance(it.peer.outcome, Averaged)


@pytest.mark.parametrize("what", ["twice", "none", "short", "long", "after the receipt"])
async def test_questions_that_no_reader_has_end_the_exchange(autojump_clock, what):
    async with liar() as it:
        await it.talk.send(await it.head(), it.own.payload[:])
        head = await it.hear_vector()
        bits = {
            "none": bytes(BLOCKS // 8),
            "short": b"\xff",
            "long": b"\xff" * (BLOCKS // 8 + 1),
        }.get(what, map_of(np.ones(BLOCKS, np.bool_)))
        if what == "after the receipt":
            await it.talk.send(Received(NAME, head.digest))
        await it.talk.send(Misread(NAME), bits)
        if what == "twice":
            await it.talk.send(Misread(NAME), bits)
        if what == "after the receipt":
            while it.peer.outcome is None:
                await trio.sleep(0.1)
            assert isinstance(it.peer.outcome, Averaged)  # it looked at nothing that came after
        else:
            # It holds our vector, so it asks us how it ended; nobody answers.
            assert await it.reason() is SkipReason.UNSETTLED


@pytest.mark.parametrize("what", ["longer", "huge", "not what it says", "wide", "noise"])
async def test_packed_vectors_that_nobody_packs_are_bad(autojump_clock, what):
    async with liar() as it:
        good = bytes(pack(it.own.payload, np.full(BLOCKS, 4, np.uint8)))
        packed, payload = {
            "longer": (len(it.own.payload), bytes(it.own.payload)),
            "huge": (1 << 50, b""),
            "not what it says": (len(good), good[:-1]),
            "wide": (len(good), b"\xff" + good[1:]),
            "noise": (len(good), np.random.default_rng(1).bytes(len(good))),
        }[what]
        await it.talk.send(await it.head(packed), payload)
        assert await it.reason() is SkipReason.BAD_VECTOR


@pytest.mark.parametrize("what", ["other codes", "fewer", "unasked"])
async def test_blocks_that_do_not_give_the_vector_are_bad(autojump_clock, what):
    async with liar() as it:
        far = vector(1, values(9, 5.0))
        it.own = replace(it.own, digest=far.digest)
        packed = pack(far.payload, np.full(BLOCKS, 2, np.uint8))
        if what == "unasked":
            await it.talk.send(Blocks(NAME), bytes(128))
        else:
            await it.talk.send(await it.head(len(packed)), packed)
            await it.hear_vector()
            _, bits = await it.talk.receive(Misread)
            count = int(np.unpackbits(np.frombuffer(bits, np.uint8)).sum())
            assert count > 0.9 * BLOCKS
            await it.talk.send(Blocks(NAME), bytes(128 * (count - (what == "fewer"))))
            if what == "other codes" and count < BLOCKS:
                await it.talk.receive(Misread)
                await it.talk.send(Blocks(NAME), bytes(128 * (BLOCKS - count)))
        assert await it.reason() is SkipReason.BAD_VECTOR


async def test_a_reader_that_goes_away_leaves_nothing_behind(autojump_clock):
    """What an exchange had to send is as large as a vector."""
    async with liar() as it:
        await it.talk.send(await it.head(), it.own.payload)
        await it.hear_vector()
        await it.talk.send(Misread(NAME), map_of(np.ones(BLOCKS, np.bool_)))
        await it.talk.aclose()
        assert await it.reason() is SkipReason.UNSETTLED
        assert it.peer.exchanges._running is None


async def test_a_question_after_the_receipt_ends_the_exchange(autojump_clock):
    async with liar() as it:
        far = vector(1, values(9, 5.0))
        it.own = replace(it.own, digest=far.digest)
        packed = pack(far.payload, np.full(BLOCKS, 2, np.uint8))
        await it.talk.send(await it.head(len(packed)), packed)
        head = await it.hear_vector()
        await it.talk.receive(Misread)
        await it.talk.send(Received(NAME, head.digest))
        asked_s = trio.current_time()
        await it.talk.send(Misread(NAME), map_of(np.ones(BLOCKS, np.bool_)))
        assert await it.reason() is SkipReason.BAD_VECTOR
        assert trio.current_time() < asked_s + 5


async def test_huge_and_broken_scales_are_never_averaged_with(autojump_clock):
    async with liar() as it:
        codes = bytearray(it.own.payload)
        codes[PARAMETERS:] = b"\x80\x7f" * BLOCKS  # infinity
        digest = blake3.blake3(codes).hexdigest(length=16)
        it.own = replace(it.own, digest=digest)
        packed = pack(codes, np.full(BLOCKS, 7, np.uint8))
        await it.talk.send(await it.head(len(packed)), packed)
        await it.hear_vector()
        with pytest.raises(StreamLost):
            while True:
                _, bits = await it.talk.receive(Misread)
                marks = np.unpackbits(np.frombuffer(bits, np.uint8))[:BLOCKS].astype(np.bool_)
                rows = np.frombuffer(codes, np.uint8)[:PARAMETERS].reshape(-1, 128)
                await it.talk.send(Blocks(NAME), rows[marks].tobytes())
        assert await it.reason() is SkipReason.BAD_VECTOR


async def test_a_packed_vector_where_nothing_is_packed_is_bad(autojump_clock):
    async with liar("int8") as it:
        packed = pack(it.own.payload, np.full(BLOCKS, 4, np.uint8))
        await it.talk.send(await it.head(len(packed)), packed)
        assert await it.reason() is SkipReason.BAD_VECTOR


@pytest.mark.parametrize("codec", ["int8", "bf16", "fp32"])
async def test_a_question_where_nothing_is_packed_ends_the_exchange(autojump_clock, codec):
    """It is the partner's fault, and nothing else of ours."""
    async with liar(codec) as it:
        await it.talk.send(Misread(NAME), map_of(np.ones(BLOCKS, np.bool_)))
        assert await it.reason() is SkipReason.BAD_VECTOR


async def test_a_receipt_counts_once(autojump_clock):
    async with liar() as it:
        packed = pack(it.own.payload, np.full(BLOCKS, 2, np.uint8))
        it.own = replace(it.own, digest=vector(1, values(9, 5.0)).digest)
        await it.talk.send(await it.head(len(packed)), packed)
        head = await it.hear_vector()
        await it.talk.receive(Misread)
        for _ in range(3):
            await it.talk.send(Received(NAME, head.digest))
        await it.talk.aclose()
        await it.reason()
        assert it.peer.gossip.packer.facts.code_bytes == len(it.peer.own.payload)


@pytest.mark.parametrize("value", [1e6, 1e30])
def test_one_partner_far_away_is_soon_forgotten(value):
    """However far away it is."""
    packer = Packer(CODEC, 1, SimulatedWork(), PackingFacts())
    own = vector(1, values(1)).payload
    for seed in range(2, 5):
        packer._learn(own, vector(seed, values(seed)).payload)
    usual = len(packer._pack(own) or own)
    packer._learn(own, vector(9, torch.full((PARAMETERS,), value)).payload)
    assert packer._pack(own) is None
    for seed in range(20):
        packer._learn(own, vector(seed, values(seed)).payload)
    assert len(packer._pack(own) or own) < 1.1 * usual
