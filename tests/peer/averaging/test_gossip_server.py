"""Two vectors behind one door: proposals, stripes and questions come to the right one."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import trio
from striped_worlds import (
    BOUNDS,
    GROUP,
    IDS,
    PARAMETERS,
    PIECE,
    Candidates,
    agreement,
    contribution,
    real_peer,
    two_networks,
)
from trio.testing import MockClock

from peer.averaging.gossip import exchanges
from peer.averaging.gossip.exchange_session import Averaged
from peer.averaging.gossip.exchanges import HeldProposal
from peer.averaging.gossip.gossip import Gossip, GossipServer
from peer.network.conversation import Conversation
from peer.observe.events import EventLog
from peer.runtime import Stream
from protocol.errors import Refused
from protocol.outcomes import RefusalReason
from protocol.wire import pieces
from protocol.wire.messages import Accept, AskSettled, Join, Piece, SettledOutcome, SettledReply
from protocol.wire.versions import GOSSIP
from simulation.network import SimulatedNetwork
from simulation.work import SimulatedWork

GROUPS = (GROUP, "cd" * 16)
SIZES = (PARAMETERS // 2, PARAMETERS)


@dataclass
class TwoVectors:
    """One peer with a vector of each group."""

    network: SimulatedNetwork
    candidates_of_vectors: list[Candidates]
    gossips: list[Gossip]
    refused: Counter[RefusalReason]

    async def average(self, vector: int, seed: int, *free: int) -> Averaged:
        """Average a vector with the other peer, if that is known to be free with its seed."""
        candidates = self.candidates_of_vectors[vector]
        for other in free:
            candidates.tell(candidates.others[0], contribution(other, SIZES[vector]).snapshot)
        own = contribution(seed, SIZES[vector])
        ended = (await self.gossips[vector].average(own, **BOUNDS)).outcome
        assert isinstance(ended, Averaged)
        return replace(ended, payload=memoryview(bytes(ended.payload)))


@asynccontextmanager
async def two_vectors(network: SimulatedNetwork) -> AsyncIterator[TwoVectors]:
    log = EventLog(lambda _: None, peer=network.peer_id, wall_time_s=lambda: 0.0, stream=None)
    others = [peer_id for peer_id in IDS if peer_id != network.peer_id]
    peer = TwoVectors(network, [], [], Counter())
    for group, size in zip(GROUPS, SIZES, strict=True):
        candidates, agreed = Candidates(*others), replace(agreement(size), group=group)
        gossip = Gossip(
            agreed,
            network,
            SimulatedWork(),
            candidates=candidates,
            events=log,
            refused=peer.refused,
        )
        peer.candidates_of_vectors.append(candidates)
        peer.gossips.append(gossip)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(GossipServer(network, peer.gossips).run)
        await trio.sleep(0.01)
        yield peer
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def two_peers() -> AsyncIterator[tuple[TwoVectors, TwoVectors]]:
    async with two_networks() as (a, b), two_vectors(a) as one, two_vectors(b) as two:
        yield one, two


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors travel on stripes."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(exchanges, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(exchanges, "STRIPE_FROM_BYTES", PIECE)


@pytest.mark.usefixtures("small_pieces")
async def test_both_vectors_are_averaged_at_the_same_time_on_stripes_of_their_own(
    autojump_clock: MockClock,
) -> None:
    async with two_peers() as (one, two):
        found: dict[tuple[str, int], Averaged] = {}

        async def average(name: str, peer: TwoVectors, vector: int, *seeds: int) -> None:
            found[name, vector] = await peer.average(vector, *seeds)

        async with trio.open_nursery() as nursery:
            for vector in range(2):
                nursery.start_soon(average, "two", two, vector, 2)
                nursery.start_soon(average, "one", one, vector, 1, 2)
        for vector in range(2):
            for name, theirs in (("one", 2), ("two", 1)):
                expected = contribution(theirs, SIZES[vector]).payload
                assert bytes(found[name, vector].payload) == bytes(expected), (name, vector)
        assert one.gossips[1].agreement.stripes > 2
        assert not one.refused + two.refused


async def test_an_earlier_version_that_asks_how_an_exchange_ended_is_answered(
    autojump_clock: MockClock,
) -> None:
    async with (
        two_peers() as (one, _),
        Conversation(await one.network.open_stream(IDS[1], GOSSIP)) as talk,
    ):
        await talk.send(AskSettled("ab" * 16))
        answer, _ = await talk.receive(SettledReply)
    assert answer == SettledReply("ab" * 16, SettledOutcome.UNKNOWN)


async def test_what_concerns_no_vector_is_refused(autojump_clock: MockClock) -> None:
    async with two_peers() as (one, two):
        proposal = replace(agreement(), group="ef" * 16).proposal(contribution(1))
        for message, answer, reason in (
            (Join("ab" * 16), Piece, RefusalReason.UNAVAILABLE),
            (proposal, Accept, RefusalReason.OTHER_GROUP),
        ):
            async with Conversation(await one.network.open_stream(IDS[1], GOSSIP)) as talk:
                await talk.send(message)
                with pytest.raises(Refused) as refused:
                    await talk.receive(answer)
            assert refused.value.reason is reason
        assert two.refused == {RefusalReason.OTHER_GROUP: 1}


async def test_who_was_refused_may_ask_again(autojump_clock: MockClock) -> None:
    async with two_peers() as (one, _):
        for _ in range(2):
            async with Conversation(await one.network.open_stream(IDS[1], GOSSIP)) as talk:
                await talk.send(agreement(SIZES[0]).proposal(contribution(1, SIZES[0])))
                with pytest.raises(Refused) as refused:
                    await talk.receive(Accept)
            assert refused.value.reason is RefusalReason.BUSY


async def test_who_goes_in_the_tick_in_which_it_is_accepted_leaves_us_looking_on(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async def accepted_and_gone(
        held: HeldProposal, _stream: Stream, on_gone: Callable[[], None]
    ) -> None:
        assert held.decided.is_set()
        on_gone()

    monkeypatch.setattr(HeldProposal, "wait_decided", accepted_and_gone)
    async with (
        two_networks() as (a, b),
        real_peer(b, seed=2) as peer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(peer.average)
        await trio.sleep(0.1)
        async with Conversation(await a.open_stream(b.peer_id, GOSSIP)) as talk:
            await talk.send(agreement().proposal(contribution(1)))
            await trio.sleep(0.1)
        free = peer.own.snapshot
        assert peer.candidates.announced == [free, None, free]
        nursery.cancel_scope.cancel()
