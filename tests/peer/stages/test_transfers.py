"""Moves of microbatches on streams: offered ahead, one after another, on streams that are kept."""

import math
from contextlib import asynccontextmanager

import pytest
import trio
from msgspec import structs
from trio.testing import wait_all_tasks_blocked

from peer.facts import PipelineFacts
from peer.network.conversation import Conversation
from peer.stages.stopwatch import Stopwatch
from peer.stages.transfers import DRAINED, MAX_AHEAD, SERVED_IDLE_S, BoundarySender
from protocol.address.peer_id import peer_id_from_public_key
from protocol.errors import StreamLost
from protocol.microbatch.core import SendBoundary
from protocol.outcomes import RefusalReason
from protocol.routing.measures import ENOUGH, Measures
from protocol.wire.messages import Refusal
from protocol.wire.stage_messages import (
    Boundary,
    BoundaryKept,
    Credit,
    Direction,
    Hop,
    Microbatch,
    Path,
)
from protocol.wire.versions import STAGE
from simulation.network import LinkModel, SimulatedInternet

LATENCY_S = 0.1
CODES = bytes(50_000)
LINK = LinkModel(latency_s=LATENCY_S, bandwidth_bytes_per_s=1e5)
ORIGIN, RELAY = (peer_id_from_public_key(bytes([n]) * 32) for n in (1, 2))


def outgoing(index):
    hop = Hop(Microbatch(ORIGIN, 1, index), Direction.FORWARD, Path((RELAY,), (1,)), 1)
    return SendBoundary(hop, index, None)


async def send(sender, command):
    return await sender.send(RELAY, command, memoryview(CODES))


class Receiver:
    """Welcomes every offer but those that it refuses."""

    def __init__(self):
        self.streams = 0
        self.ended = 0
        self.offered = []
        self.refused = set()
        self.arrived_s = {}

    async def serve(self, stream):
        self.streams += 1
        async with Conversation(stream) as talk:
            try:
                while True:
                    await self._take(talk)
            except StreamLost:
                self.ended += 1

    async def _take(self, talk):
        hop, _ = await talk.receive(Hop)
        index = hop.microbatch.index
        self.offered.append(index)
        if index in self.refused:
            await talk.send(Refusal(RefusalReason.BEHIND, "no"))
            return
        await talk.send(Credit(0.0))
        await talk.receive(Boundary, into=memoryview(bytearray(len(CODES))))
        self.arrived_s[index] = trio.current_time()
        await talk.send(BoundaryKept())


@asynccontextmanager
async def line():
    internet, receiver = SimulatedInternet(1, link=LINK), Receiver()
    stopwatch = Stopwatch(Measures(), PipelineFacts(), has_loss=False)
    async with internet.open_network(ORIGIN) as ours, internet.open_network(RELAY) as theirs:
        await theirs.serve(STAGE, receiver.serve)
        await ours.connect(RELAY, theirs.addresses)
        yield BoundarySender(ours, math.inf, stopwatch), receiver


async def test_a_stream_is_used_again(autojump_clock):
    async with line() as (sender, receiver):
        for index in range(3):
            assert await send(sender, outgoing(index))
        assert receiver.offered == [0, 1, 2]
        assert receiver.streams == 1


async def test_one_that_was_idle_for_long_is_not(autojump_clock):
    async with line() as (sender, receiver):
        assert await send(sender, outgoing(0))
        await trio.sleep(SERVED_IDLE_S / 2 + 1)
        assert await send(sender, outgoing(1))
        await trio.sleep(1)
        assert (receiver.streams, receiver.ended) == (2, 1)


async def test_what_was_offered_ahead_takes_the_latency_once(autojump_clock):
    async with line() as (sender, receiver):
        for _ in range(2):
            sender.plan_ahead(outgoing(0).hop)
            await sender.offer_ahead(RELAY, outgoing(0).hop)
        await trio.sleep(1.0)
        begin_s = trio.current_time()
        assert await send(sender, outgoing(0))
        took_s = receiver.arrived_s[0] - begin_s
        assert took_s == pytest.approx(LATENCY_S + len(CODES) / 1e5, abs=0.05)
        assert receiver.offered == [0]


async def test_a_boundary_that_is_ready_while_it_is_offered_waits_for_that(autojump_clock):
    async with line() as (sender, receiver), trio.open_nursery() as nursery:
        sender.plan_ahead(outgoing(0).hop)
        nursery.start_soon(sender.offer_ahead, RELAY, outgoing(0).hop)
        await wait_all_tasks_blocked()
        assert await send(sender, outgoing(0))
        assert receiver.offered == [0]


async def test_one_that_is_sent_before_it_could_be_offered_is_offered_once(autojump_clock):
    async with line() as (sender, receiver):
        sender.plan_ahead(outgoing(0).hop)
        assert await send(sender, outgoing(0))
        await sender.offer_ahead(RELAY, outgoing(0).hop)
        assert receiver.offered == [0]


@pytest.mark.parametrize("attempt", [0, 1])
async def test_what_will_not_come_is_withdrawn(autojump_clock, attempt):
    async with line() as (sender, receiver):
        for index in range(2):
            hop = structs.replace(outgoing(index).hop, attempt=attempt)
            sender.plan_ahead(hop)
            await sender.offer_ahead(RELAY, hop)
        await sender.withdraw(outgoing(0).hop.microbatch, attempt)
        await trio.sleep(1.0)
        assert receiver.ended == 1
        assert await send(sender, SendBoundary(hop, 1, None))


async def test_with_an_attempt_goes_what_was_offered_of_those_before(autojump_clock):
    async with line() as (sender, receiver):
        hops = [structs.replace(outgoing(0).hop, attempt=attempt) for attempt in range(3)]
        for hop in hops:
            sender.plan_ahead(hop)
            await sender.offer_ahead(RELAY, hop)
        await sender.withdraw(hops[1].microbatch, 1)
        await trio.sleep(1.0)
        assert receiver.ended == 2
        assert list(sender._ahead) == [hops[2]]


async def test_one_move_is_taken_back_and_no_other(autojump_clock):
    async with line() as (sender, receiver):
        for index in range(2):
            sender.plan_ahead(outgoing(index).hop)
            await sender.offer_ahead(RELAY, outgoing(index).hop)
        for _ in range(2):
            await sender.take_back(outgoing(0).hop)
        await trio.sleep(1.0)
        assert receiver.ended == 1
        assert await send(sender, outgoing(1))


async def test_no_more_than_so_many_are_offered_ahead(autojump_clock):
    async with line() as (sender, receiver):
        for index in range(MAX_AHEAD + 2):
            sender.plan_ahead(outgoing(index).hop)
        await sender.offer_ahead(RELAY, outgoing(MAX_AHEAD).hop)
        assert not receiver.offered
        assert await send(sender, outgoing(MAX_AHEAD))
        await sender.offer_ahead(RELAY, outgoing(0).hop)
        await trio.sleep(1.0)
        assert receiver.offered == [MAX_AHEAD, 0]


async def test_an_offer_that_is_withdrawn_while_it_is_made_is_taken_back(autojump_clock):
    async with line() as (sender, receiver), trio.open_nursery() as nursery:
        sender.plan_ahead(outgoing(0).hop)
        nursery.start_soon(sender.offer_ahead, RELAY, outgoing(0).hop)
        await wait_all_tasks_blocked()
        await sender.withdraw(outgoing(0).hop.microbatch, 0)
        await trio.sleep(1.0)
        assert receiver.streams == receiver.ended


async def test_boundaries_to_one_peer_go_one_after_another(autojump_clock):
    """Side by side, each would arrive as late as the last one."""
    async with line() as (sender, receiver):
        begin_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for index in range(3):
                nursery.start_soon(send, sender, outgoing(index))
        each_s = len(CODES) / 1e5
        took_s = sorted(at_s - begin_s for at_s in receiver.arrived_s.values())
        opened_s = took_s[0] - each_s
        assert took_s == pytest.approx([opened_s + n * each_s for n in (1, 2, 3)], abs=0.05)
        assert opened_s < 6 * LATENCY_S


async def test_a_refusal_is_no_success_and_ends_nothing_else(autojump_clock):
    async with line() as (sender, receiver):
        receiver.refused = {1}
        assert await send(sender, outgoing(0))
        assert not await send(sender, outgoing(1))
        assert await send(sender, outgoing(2))


async def test_the_next_one_waits_until_the_line_is_nearly_free(autojump_clock):
    """What lies in p2pd's buffers is not on the line yet, and small messages wait behind it."""
    async with line() as (sender, _):
        for index in range(ENOUGH):
            assert await send(sender, outgoing(index))
        measured_s = sender._stopwatch.measures.line_s(RELAY)
        assert measured_s == pytest.approx(len(CODES) / 1e5, abs=0.25)
        began_s = trio.current_time()
        talk = await sender._credited(RELAY, outgoing(7).hop)
        assert not await sender._drained(talk, RELAY, began_s)
        assert trio.current_time() - began_s == pytest.approx(DRAINED * measured_s, abs=0.01)


async def test_after_one_kept_stream_has_failed_the_others_are_not_tried(autojump_clock):
    """A peer that starts again leaves as many dead streams as were kept to it."""
    async with line() as (sender, receiver):
        async with trio.open_nursery() as nursery:
            for index in range(3):
                nursery.start_soon(send, sender, outgoing(index))
        assert receiver.streams == 3
        for _, talk in sender._idle[RELAY]:
            await talk.aclose()
        assert not await send(sender, outgoing(3))
        assert await send(sender, outgoing(4))
        assert receiver.streams == 4
