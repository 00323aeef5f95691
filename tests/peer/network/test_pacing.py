"""Limits of the line: bulk waits for its turn, small messages do not."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from network_worlds import peer_id_of
from trio.testing import MockClock

from peer.network.conversation import Conversation
from peer.network.pacing import (
    ACKNOWLEDGEMENTS,
    BURST_S,
    FASTER,
    NO_LIMITS,
    TURN_BYTES,
    WIRE_FACTOR,
    BandwidthLimits,
    Bucket,
    Pacing,
)
from peer.runtime import Stream
from protocol.wire.messages import Leaving, Vector
from protocol.wire.versions import GOSSIP, HELLO
from simulation.network import SimulatedInternet, SimulatedNetwork

A, B = peer_id_of("a"), peer_id_of("b")
MBIT = 125_000.0
BULK = bytes(1_000_000)


# --- a bucket -------------------------------------------------------------------------------------
async def test_turns_keep_to_the_rate_and_to_their_order(autojump_clock: MockClock) -> None:
    bucket, order = Bucket(1000.0), []

    async def take(name: int) -> None:
        await bucket.turn(500)
        order.append((name, trio.current_time()))

    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        for name in range(5):
            nursery.start_soon(take, name)
            await trio.testing.wait_all_tasks_blocked()
    assert [name for name, _ in order] == list(range(5))
    assert order[-1][1] - began_s == pytest.approx(4 * 0.5 - BURST_S)


async def test_what_is_charged_goes_before_whoever_waits(autojump_clock: MockClock) -> None:
    bucket, began_s = Bucket(1000.0), trio.current_time()
    bucket.charge(2000)
    await bucket.turn(1)
    assert trio.current_time() - began_s == pytest.approx(2.0 - BURST_S)


async def test_the_load_is_what_the_line_carries_of_its_limits(autojump_clock: MockClock) -> None:
    pacing, free = Pacing(BandwidthLimits(8.0)), Pacing(NO_LIMITS)
    assert pacing.loads == (0.0, 0.0)

    async def carry(share: float, seconds: int) -> float:
        for _ in range(seconds):
            for line in (pacing, free):
                line.sent(B, int(share * 8 * MBIT / WIRE_FACTOR))
            await trio.sleep(1.0)
        return pacing.loads[0]

    assert await carry(0.5, 600) == pytest.approx(0.5, abs=0.01)
    assert await carry(1.0, 200) > 0.9, "long enough to be told"
    assert await carry(0.0, 120) < 0.2
    assert free.loads == (0.0, 0.0)


async def test_another_rate_counts_at_once(autojump_clock: MockClock) -> None:
    bucket, began_s = Bucket(1.0), trio.current_time()
    bucket.charge(1000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bucket.turn, 1)
        await trio.sleep(100)
        bucket.change_rate(900.0)
    assert trio.current_time() - began_s == pytest.approx(101, abs=0.1)


async def test_no_rate_never_waits(autojump_clock: MockClock) -> None:
    bucket, began_s = Bucket(), trio.current_time()
    bucket.charge(1e12)
    await bucket.turn(1e12)
    assert trio.current_time() == began_s


# --- streams --------------------------------------------------------------------------------------
class World:
    """Two peers with limits of their own; the second takes all that comes, and answers."""

    def __init__(self, internet: SimulatedInternet) -> None:
        self.internet = internet
        self.pacing: dict[str, Pacing] = {}
        self.network: SimulatedNetwork

    async def take(self, stream: Stream) -> None:
        async with Conversation(stream) as talk:
            while True:
                message, _ = await talk.receive(max_payload_bytes=len(BULK))
                await talk.send(message)

    async def send(self, talk: Conversation) -> float:
        """Seconds until a vector of BULK bytes was taken."""
        began_s = trio.current_time()
        await talk.send(Vector("cd" * 16, 1, 1, "int8", 1, "ab" * 16), BULK)
        await talk.receive(Vector)
        return trio.current_time() - began_s

    async def open(self, protocol: str = GOSSIP) -> Conversation:
        return Conversation(await self.network.open_stream(B, protocol))


@asynccontextmanager
async def opened(
    ours: BandwidthLimits = NO_LIMITS, theirs: BandwidthLimits = NO_LIMITS
) -> AsyncIterator[World]:
    world = World(SimulatedInternet(seed=1))
    async with world.internet.open_network(A) as a, world.internet.open_network(B) as b:
        world.pacing = {A: Pacing(ours), B: Pacing(theirs)}
        a.pacing, b.pacing, world.network = world.pacing[A], world.pacing[B], a
        for protocol in (GOSSIP, HELLO):
            await b.serve(protocol, world.take)
        await a.connect(B, b.addresses)
        yield world


def seconds_at(mbps: float) -> float:
    return len(BULK) * WIRE_FACTOR / (mbps * MBIT)


@pytest.mark.parametrize("limits", [(2.0, None, None, None), (None, None, None, 2.0)])
async def test_either_limit_holds_bulk_back(
    autojump_clock: MockClock, limits: tuple[float | None, ...]
) -> None:
    ours, theirs = BandwidthLimits(*limits[:2]), BandwidthLimits(*limits[2:])
    async with opened(ours, theirs) as world, await world.open() as talk:
        await world.send(talk)
        assert await world.send(talk) == pytest.approx(seconds_at(2.0), rel=0.1)


async def test_small_messages_pass_while_bulk_waits(autojump_clock: MockClock) -> None:
    async with (
        opened(BandwidthLimits(1.0)) as world,
        await world.open() as bulk,
        await world.open(HELLO) as small,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(world.send, bulk)
        await trio.sleep(1.0)
        began_s = trio.current_time()
        await small.send(Leaving())
        await small.receive(Leaving)
        assert trio.current_time() - began_s < 0.2


async def test_a_peer_that_is_told_its_share_keeps_to_it(autojump_clock: MockClock) -> None:
    async with opened(theirs=BandwidthLimits(None, 8.0)) as world, await world.open() as talk:
        world.pacing[B].senders = lambda: 4
        share = world.pacing[B].may_send_bytes_per_s
        assert share == pytest.approx(2.0 * MBIT / WIRE_FACTOR)
        world.pacing[A].heard(B, 1.0, 0, share)
        assert await world.send(talk) == pytest.approx(seconds_at(2.0), rel=0.1)


async def test_a_share_of_nothing_holds_back_until_there_is_more(
    autojump_clock: MockClock,
) -> None:
    async with opened() as world, await world.open() as talk, trio.open_nursery() as nursery:
        world.pacing[A].heard(B, 1.0, 0, 0.0)
        began_s = trio.current_time()
        nursery.start_soon(world.send, talk)
        await trio.sleep(60)
        assert world.pacing[B].received_bytes(A) < TURN_BYTES
        world.pacing[A].heard(B, 2.0, 0, None)
    assert trio.current_time() - began_s < 61


async def test_bulk_goes_a_little_faster_than_was_measured(autojump_clock: MockClock) -> None:
    pacing, began_s = Pacing(NO_LIMITS), trio.current_time()
    pacing.measured(B, 100_000.0)
    sent = 0
    while sent < 500_000:
        sent += await pacing.turn(B, 500_000 - sent)
    assert trio.current_time() - began_s == pytest.approx(5.0 / FASTER, abs=0.3)
    pacing.measured(B, math.inf)
    assert await pacing.turn(B, 500_000) == 500_000


async def test_what_comes_is_counted_for_its_sender(autojump_clock: MockClock) -> None:
    async with opened() as world, await world.open() as talk:
        assert world.pacing[B].last_byte_s(A) == -math.inf
        await world.send(talk)
        sent_bytes = world.network.statistics().sent_bytes[GOSSIP]
        assert world.pacing[B].received_bytes(A) == sent_bytes > len(BULK)
        assert world.pacing[A].received_bytes(B) == talk.bytes_received
        assert world.pacing[B].last_byte_s(A) > -math.inf


async def test_acknowledgements_count_the_other_way(autojump_clock: MockClock) -> None:
    pacing, began_s = Pacing(BandwidthLimits(1.0, None)), trio.current_time()
    pacing.received(B, 10_000_000)
    await pacing.turn(B, TURN_BYTES)
    waited_s = trio.current_time() - began_s
    assert waited_s == pytest.approx(10_000_000 * ACKNOWLEDGEMENTS / MBIT - BURST_S)
