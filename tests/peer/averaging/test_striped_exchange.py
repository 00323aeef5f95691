"""Exchanges over several streams: pieces in any order, and all that can go wrong with one."""

import gc
import itertools
import weakref
from dataclasses import replace

import pytest
import trio
import trio.testing
from striped_worlds import (
    BOUNDS,
    IDS,
    LINK,
    NAME,
    PARAMETERS,
    PIECE,
    ROUNDS,
    Peer,
    agreement,
    contribution,
    real_peer,
    rogue,
    two_networks,
    two_networks_of,
)

from peer.averaging.gossip import exchanges
from peer.averaging.gossip.exchange_session import GOSSIP_STALL_S, Averaged, Skipped
from peer.network.conversation import Conversation
from protocol.errors import Refused, StreamLost
from protocol.limits import INBOUND_STREAMS, MAX_STRIPES, STRIPE_FROM_BYTES
from protocol.outcomes import RefusalReason, SkipReason
from protocol.wire import pieces
from protocol.wire.messages import Accept, Join, Piece, Propose, Vector
from protocol.wire.versions import GOSSIP
from simulation.network import SimulatedInternet

LONG = STRIPE_FROM_BYTES // 128 * 128
"""Parameters whose int8 codes are a little longer than what stays on one stream."""
SHORT = LONG * 120 // 128 // 128 * 128


@pytest.fixture
def small(monkeypatch):
    """Short vectors in small pieces."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(exchanges, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(exchanges, "STRIPE_FROM_BYTES", 2 * PIECE)


def skipped(peer: Peer) -> SkipReason:
    assert isinstance(peer.outcome, Skipped)
    return peer.outcome.reason


def averaged_with(peer: Peer, seed: int, parameters: int = PARAMETERS) -> bool:
    assert isinstance(peer.outcome, Averaged)
    return bytes(peer.outcome.payload) == bytes(contribution(seed, parameters).payload)


async def both_average(parameters: int) -> tuple[Peer, Peer, int]:
    """Two real peers; and how many streams were open at once."""
    async with (
        two_networks() as (a, b),
        real_peer(a, 1, parameters) as one,
        real_peer(b, 2, parameters) as two,
    ):
        most = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.average, one.own)
            nursery.start_soon(one.average, two.own)
            while one.outcome is None or two.outcome is None:
                most = max(most, len(a.streams))
                await trio.sleep(0.01)
        await trio.sleep(1.0)
        assert len(a.streams) == len(b.streams) == 0
        return one, two, most


@pytest.mark.parametrize(
    ("parameters", "stripes"), [(SHORT, 0), (LONG, 8), (4 * LONG, MAX_STRIPES)]
)
def test_no_stripe_is_asked_for_that_would_carry_no_piece(parameters, stripes):
    assert agreement(parameters).stripes == stripes


def test_all_stripes_of_an_exchange_and_what_else_a_peer_opens_are_let_in():
    assert INBOUND_STREAMS.per_peer >= MAX_STRIPES + 4


@pytest.mark.parametrize(
    ("parameters", "stripes"),
    [(LONG, 8), pytest.param(4 * LONG, MAX_STRIPES, marks=pytest.mark.long), (SHORT, 0)],
)
@pytest.mark.slow
async def test_a_long_vector_takes_stripes_and_no_more_bytes(autojump_clock, parameters, stripes):
    one, two, most = await both_average(parameters)
    assert averaged_with(one, 2, parameters)
    assert averaged_with(two, 1, parameters)
    assert stripes < most <= stripes + 2  # both may propose at once
    for peer in (one, two):
        carried = peer.network.statistics()
        assert 1.0 <= carried.sent_bytes[GOSSIP] / parameters <= 1.03
        assert 1.0 <= carried.received_bytes[GOSSIP] / parameters <= 1.03


@pytest.mark.parametrize("stripe_from_bytes", [2 * PIECE, STRIPE_FROM_BYTES])
async def test_an_exchange_that_is_over_keeps_no_vector(
    autojump_clock, small, monkeypatch, stripe_from_bytes
):
    monkeypatch.setattr(exchanges, "STRIPE_FROM_BYTES", stripe_from_bytes)
    async with two_networks() as (a, b), real_peer(a, 1) as one, real_peer(b, 2) as two:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.average, one.own)
            nursery.start_soon(one.average, two.own)
        assert averaged_with(one, 2)
        payloads = [weakref.ref(peer.own.payload) for peer in (one, two)]
        for peer in (one, two):
            peer.candidates.free_now.clear()
            peer.own = replace(contribution(3), round=20)
            await peer.gossip.average(peer.own, **BOUNDS)
        gc.collect()
        assert [payload() for payload in payloads] == [None, None]


@pytest.mark.parametrize("stripe_from_bytes", [2 * PIECE, STRIPE_FROM_BYTES])
async def test_a_mistake_of_our_own_is_not_the_partners(
    autojump_clock, small, monkeypatch, stripe_from_bytes
):
    monkeypatch.setattr(exchanges, "STRIPE_FROM_BYTES", stripe_from_bytes)
    mistaken = replace(contribution(2), digest="what no partner would take")
    async with two_networks() as (a, b), real_peer(a, 1) as one, real_peer(b, 2) as two:
        two.own = mistaken
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.average)
            nursery.start_soon(two.average, one.own)
    assert two.outcome == Skipped(SkipReason.OWN_MISTAKE, a.peer_id)


async def test_pieces_come_in_any_order_on_any_stream(autojump_clock, small):
    async with rogue() as (r, peer):
        theirs = bytearray(len(r.own.payload))
        stripes = [await r.join() for _ in range(3)]
        await r.say_head()
        for start, stripe in zip(reversed(r.starts()), itertools.cycle(stripes), strict=False):
            await r.say_piece(stripe, start)
        with trio.CancelScope() as listening:
            async with trio.open_nursery() as listeners:
                for stripe in stripes:
                    listeners.start_soon(r.hear_pieces, stripe, theirs)
                await r.finish()
                listening.cancel()
    assert averaged_with(peer, 1)
    assert theirs == peer.own.payload


async def test_one_stripe_of_many_is_enough(autojump_clock, small):
    async with rogue() as (r, peer):
        assert r.accept.stripes == 8  # as proposed
        theirs, stripe = bytearray(len(r.own.payload)), await r.join()
        await r.say_head()
        with trio.CancelScope() as listening:
            async with trio.open_nursery() as listeners:
                listeners.start_soon(r.hear_pieces, stripe, theirs)
                for start in r.starts():
                    await r.say_piece(stripe, start)
                await r.finish()
                listening.cancel()
    assert averaged_with(peer, 1)
    assert theirs == peer.own.payload


async def test_without_any_stripe_it_stalls_within_the_bound(autojump_clock, small):
    async with rogue() as (r, peer):
        await r.say_head()
        accepted_s = trio.current_time()
    assert skipped(peer) is SkipReason.PARTNER_STALLED
    assert peer.ended_s - accepted_s < GOSSIP_STALL_S + 1


async def test_a_stripe_that_falls_silent_stalls_the_exchange_only_if_all_do(autojump_clock, small):
    async with rogue() as (r, peer):
        silent, busy = await r.join(), await r.join()
        await r.say_head()
        await r.say_piece(silent, 0)
        for start in r.starts()[1:-1]:
            await trio.sleep(3 * GOSSIP_STALL_S / len(r.starts()))
            await r.say_piece(busy, start)
        assert peer.outcome is None
        last_s = trio.current_time()
    assert skipped(peer) is SkipReason.PARTNER_STALLED
    assert GOSSIP_STALL_S - 1 < peer.ended_s - last_s < GOSSIP_STALL_S + 1


@pytest.mark.parametrize("whole_pieces", [0, 3])
async def test_a_lost_stripe_loses_the_exchange(autojump_clock, small, whole_pieces):
    async with rogue() as (r, peer):
        first, _second = await r.join(), await r.join()
        await r.say_head()
        for start in r.starts()[:whole_pieces]:
            await r.say_piece(first, start)
        await first.aclose()
        lost_s = trio.current_time()
    assert skipped(peer) is SkipReason.PARTNER_LOST
    assert peer.ended_s - lost_s < 1


@pytest.mark.parametrize(
    ("start", "num_bytes"), [(0, PIECE), (PIECE + 1, PIECE), (PIECE, PIECE - 1), (1 << 40, PIECE)]
)
async def test_a_piece_that_is_none_or_comes_twice_is_a_bad_vector(
    autojump_clock, small, start, num_bytes
):
    async with rogue() as (r, peer):
        one, other = await r.join(), await r.join()
        await r.say_head()
        await r.say_piece(one, 0)
        await other.send(Piece(start), bytes(num_bytes))
    assert skipped(peer) is SkipReason.BAD_VECTOR


async def test_the_digest_covers_the_whole(autojump_clock, small):
    async with rogue() as (r, peer):
        stripe = await r.join()
        await r.say_head()
        for start in r.starts()[:-1]:
            await r.say_piece(stripe, start)
        last = bytearray(r.own.payload[r.starts()[-1] :])
        last[0] ^= 1
        await stripe.send(Piece(r.starts()[-1]), last)
    assert skipped(peer) is SkipReason.BAD_VECTOR


async def test_a_vector_on_the_first_stream_is_not_what_was_agreed(autojump_clock, small):
    async with rogue() as (r, peer):
        own = r.own
        head = Vector(NAME, 1, 1, "int8", 1, own.digest)
        with pytest.raises(StreamLost):
            await r.talk.send(head, own.payload)
            await r.talk.receive(Vector)
    assert skipped(peer) is SkipReason.BAD_VECTOR


async def test_stripes_beyond_the_bound_or_of_no_exchange_are_refused_alone(autojump_clock, small):
    async with rogue(stripes=2) as (r, peer):
        assert r.accept.stripes == 2
        stripes = [await r.join(), await r.join()]
        await trio.sleep(1.0)
        for refused, reason in (
            (await r.join(), RefusalReason.TOO_MANY),
            (await r.join(exchange="cd" * 16), RefusalReason.UNAVAILABLE),
        ):
            with pytest.raises(Refused) as info:
                await refused.receive(Piece)
            assert info.value.reason is reason
        theirs = bytearray(len(r.own.payload))
        await r.say_head()
        for start in r.starts():
            await r.say_piece(stripes[0], start)
        with trio.CancelScope() as listening:
            async with trio.open_nursery() as listeners:
                for stripe in stripes:
                    listeners.start_soon(r.hear_pieces, stripe, theirs)
                await r.finish()
                listening.cancel()
        assert theirs == peer.own.payload
        await trio.sleep(1.0)
        late = await r.join()
        with pytest.raises(Refused) as info:
            await late.receive(Piece)
        assert info.value.reason is RefusalReason.UNAVAILABLE
    assert averaged_with(peer, 1)


async def test_who_was_asked_sends_no_piece_before_the_other_has_begun(autojump_clock, small):
    async with rogue() as (r, peer):
        stripe = await r.join()
        with trio.move_on_after(GOSSIP_STALL_S / 2):
            await stripe.receive(Piece)
            raise AssertionError("a piece for nobody")
        assert peer.outcome is None
        await r.say_head()
        await stripe.receive(Piece)
        await r.talk.aclose()
    assert skipped(peer) is SkipReason.PARTNER_LOST


@pytest.mark.parametrize("answer", ["refuse", "hang up"])
async def test_stripes_that_are_not_taken_lose_the_exchange(autojump_clock, small, answer):
    async def serve(stream):
        talk = Conversation(stream)
        message, _ = await talk.receive(Propose, Join)
        if isinstance(message, Propose):
            await talk.send(Accept(message.round, ROUNDS[1], 1, 1, message.stripes))
            await talk.receive(Vector)
            await trio.sleep(30.0)
        elif answer == "refuse":
            await talk.refuse(RefusalReason.TOO_MANY, "no")

    async with two_networks() as (a, b), real_peer(a, seed=1) as peer:
        await b.serve(GOSSIP, serve)
        await peer.average(contribution(2))
        assert skipped(peer) is SkipReason.PARTNER_LOST
        assert len(a.streams) == 0


async def test_more_stripes_than_proposed_are_no_agreement(autojump_clock):
    async def serve(stream):
        talk = Conversation(stream)
        proposal, _ = await talk.receive(Propose)
        await talk.send(Accept(proposal.round, ROUNDS[1], 1, 1, 1))
        await trio.sleep(30.0)

    async with two_networks() as (a, b), real_peer(a, seed=1) as peer:
        await b.serve(GOSSIP, serve)
        await peer.average(contribution(2))
        assert skipped(peer) is SkipReason.DEADLINE  # as if it had said nothing


async def test_who_knows_no_stripes_gets_one_stream(autojump_clock, small):
    async with rogue(stripes=0) as (r, peer):
        assert r.accept.stripes == 0
        own = r.own
        head = Vector(NAME, 1, 1, "int8", 1, own.digest)
        await r.talk.send(head, own.payload)
        await r.finish()
    assert averaged_with(peer, 1)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("eighths", range(1, 8))
async def test_cancelled_at_any_time_no_stream_is_left(autojump_clock, small, who, eighths):
    whole_s = 0.08 + len(contribution(1).payload) / LINK.bandwidth_bytes_per_s
    internet = SimulatedInternet(seed=1, link=LINK)
    async with (
        two_networks_of(internet) as networks,
        real_peer(networks[0], 1) as one,
        real_peer(networks[1], 2) as two,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(two.average, one.own)
        nursery.start_soon(one.average, two.own)
        await trio.sleep(whole_s * eighths / 8)
        (one, two)[who].scope.cancel()
        internet.kill(IDS[who])
        await trio.sleep(2 * GOSSIP_STALL_S)
        assert (one, two)[1 - who].outcome is not None
        assert len(networks[1 - who].streams) == 0
