"""The shell around the core, alone: what it does when the trainer lets nobody write."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
import trio.testing
from owner_worlds import CYCLE, FRAGMENT, GROUP, IDENTITIES, IDS, codes_of, outer_copy

from peer.averaging.diloco.fragment_exchange import FragmentExchange, FragmentParts
from peer.averaging.diloco.nesterov import NesterovFactors
from peer.averaging.diloco.outer_fragments import OuterFragments
from peer.codec import get_codec
from peer.facts import Facts
from peer.network.conversation import Conversation
from peer.observe.events import EventLog
from peer.rounds.services import Services
from protocol.diloco.collecting import MAX_COLLECT_S
from protocol.diloco.commands import GroupSeen, HoldOutcome, SendEnded, Sent
from protocol.diloco.peers import FragmentCounts
from protocol.errors import Refused
from protocol.fragment.fragments import cut_fragments
from protocol.limits import READERS
from protocol.membership.view import Roster
from protocol.outcomes import RefusalReason
from protocol.run.layout import Layout
from protocol.trainer_messages import Merge, Yield
from protocol.wire.fragment_messages import (
    ChunkStateReply,
    GetChunkState,
    GetOpening,
    GetStamps,
    Stamps,
)
from protocol.wire.versions import FRAGMENT as PROTOCOL
from simulation.network import SimulatedInternet
from simulation.work import SimulatedWork

MAX_RETURN_S = 2 * MAX_COLLECT_S
"""The longest that a machine waits for its results."""


class Trainer:
    """Reads the whole outer copy unless `free` is set."""

    def __init__(self) -> None:
        self.free = trio.Event()
        self.free.set()
        self.merged: list[tuple[float, Merge]] = []

    @property
    def can_write(self) -> bool:
        return self.free.is_set()

    async def may_write(self) -> None:
        await self.free.wait()

    async def merge(self, message: Merge) -> None:
        assert message.cycle is not None, "nothing was yielded"
        self.merged.append((trio.current_time(), message))

    async def hold(self, message: Yield) -> HoldOutcome:
        return HoldOutcome.FREE


class World:
    """One exchange, alone in its group."""

    def __init__(self, outer: OuterFragments) -> None:
        self.outer = outer
        self.trainer = Trainer()
        self.internet = SimulatedInternet(1)
        self.returned_sends: list[SendEnded] = []

    def seen(self) -> GroupSeen:
        return GroupSeen(CYCLE, frozenset(IDS[:1]), {})

    def is_linked(self, peer_id: str) -> bool:
        return True

    def convicted(self, owner: str) -> None:
        raise AssertionError("there is nobody to convict")

    def read(self) -> Sequence[tuple[str, bytes]]:
        return []

    def keep(self, owner: str, proof: bytes) -> None:
        raise AssertionError("there is nobody to convict")

    @asynccontextmanager
    async def exchange(self) -> AsyncIterator[FragmentExchange]:
        async with self.internet.open_network(IDS[0]) as network:
            self.lock, self.addresses = trio.Lock(), network.addresses
            services = Services(
                network=network,
                work=SimulatedWork(),
                roster=Roster(silence_s=10.0),
                events=EventLog(lambda _: None, peer="", wall_time_s=lambda: 0.0, stream=None),
                facts=Facts(network.peer_id, incarnation=1),
                sign=IDENTITIES[0].sign,
            )
            parts = FragmentParts(
                services=services,
                group=GROUP,
                members=self,
                trainer=self.trainer,
                ended=self.returned_sends.append,
                convict=self.convicted,
                proofs=self,
                lock=self.lock,
                counts=FragmentCounts(),
                inner_steps=1,
                trims=False,
                last_sent=[-1] * len(self.outer.fragments),
            )
            exchange = FragmentExchange(parts, self.outer)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(exchange.run)
                await trio.testing.wait_all_tasks_blocked()
                yield exchange
                nursery.cancel_scope.cancel()


@pytest.fixture
def world():
    return World(outer_copy())


def send(outer: OuterFragments) -> Sent:
    codes = b"".join(codes_of(outer, chunk, 0.5) for chunk in (0, 1))
    return Sent(FRAGMENT, CYCLE, memoryview(codes), 1, 1)


async def test_alone_a_fragment_is_stepped_and_merged_at_once(world, autojump_clock):
    async with world.exchange() as exchange:
        exchange.sent(send(world.outer))
        await trio.sleep(0.1)
        assert [changes for _, changes in world.trainer.merged] == [
            Merge(FRAGMENT, CYCLE, (0, 1), ())
        ]
        assert [(each.contributors, each.missing) for each in world.returned_sends] == [(1, 0)]


async def test_who_may_not_write_in_time_merges_without_what_came(world, autojump_clock):
    """The trainer may be reading until it can merge: neither must wait for the other for ever."""
    async with world.exchange() as exchange:
        before = world.outer.read(FRAGMENT, 0)
        averaged = exchange._averages.averaged

        def reads_from_now_on(order):
            world.trainer.free = trio.Event()
            return averaged(order)

        exchange._averages.averaged = reads_from_now_on
        began_s = trio.current_time()
        exchange.sent(send(world.outer))
        await trio.sleep(MAX_RETURN_S - 1)
        assert world.trainer.merged == []
        await trio.sleep(2)
        ((at_s, changes),) = world.trainer.merged
        assert changes == Merge(FRAGMENT, CYCLE, (), ())
        assert at_s - began_s == pytest.approx(MAX_RETURN_S)
        assert [each.missing for each in world.returned_sends] == [2]
        assert world.outer.read(FRAGMENT, 0) == before


async def test_fragments_sent_together_are_checked_and_leave_in_that_order(autojump_clock):
    layout = Layout.from_shapes({f"layers.{i}.weight": (8192,) for i in range(3)})
    phi = np.zeros(layout.padded_parameters, np.float32)
    fragments = cut_fragments(layout, "sequential", 1)
    factors = NesterovFactors(1.0, 0.0)
    world = World(
        OuterFragments(fragments, phi, phi.copy(), get_codec("fp32"), factors, lambda _: False)
    )
    async with world.exchange() as exchange:
        for fragment in (2, 0, 1):
            codes = memoryview(bytes(world.outer.chunk_code_bytes(fragment, 0)))
            exchange.sent(Sent(fragment, CYCLE, codes, 1, 1))
        await trio.sleep(MAX_RETURN_S)
    assert [each.fragment for each in world.returned_sends] == [2, 0, 1]


async def test_readers_of_chunks_have_so_many_places_and_auditors_have_others(
    world, autojump_clock
):
    chunk, outcomes = GetChunkState(GROUP, FRAGMENT, 0), list[str]()

    async def ask(network, question) -> None:
        async with Conversation(await network.open_stream(IDS[0], PROTOCOL)) as talk:
            try:
                await talk.send(question)
                outcomes.append(type((await talk.receive(ChunkStateReply, Stamps))[0]).__name__)
            except Refused as refusal:
                outcomes.append(refusal.reason)

    async with (
        world.exchange(),
        world.internet.open_network(IDS[1]) as network,
        world.lock,
        trio.open_nursery() as nursery,
    ):
        await network.connect(IDS[0], world.addresses)
        for _ in range(READERS.per_peer + 1):
            nursery.start_soon(ask, network, chunk)
        await trio.sleep(1.0)
        assert outcomes == [RefusalReason.TOO_MANY]
        nursery.start_soon(ask, network, GetOpening(GROUP, FRAGMENT, 0, 0, 0))
        nursery.start_soon(ask, network, GetStamps(GROUP, FRAGMENT))
        await trio.sleep(1.0)
        assert sorted(outcomes[1:]) == ["Stamps", RefusalReason.UNAVAILABLE]
        world.lock.release()
        await trio.sleep(1.0)
        assert outcomes[3:] == ["ChunkStateReply"] * READERS.per_peer
        await world.lock.acquire()
