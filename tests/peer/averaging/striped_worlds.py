"""Two peers that gossip in virtual time: real ones, and one that keeps to no rules."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import blake3
import numpy as np
import torch
import trio
from msgspec.structs import replace

from peer.averaging.gossip.exchange_session import OwnVector, RoundOutcome
from peer.averaging.gossip.exchanges import Agreement, Exchanges
from peer.averaging.gossip.final_rounds import FinalMeetings
from peer.averaging.gossip.gossip import Gossip, GossipServer
from peer.codec import get_codec
from peer.facts import PackingFacts
from peer.network.conversation import Conversation
from peer.observe.events import EventLog
from peer.runtime import PeerId
from protocol.address.peer_id import peer_id_from_public_key
from protocol.gossip.exchange import exchange_id
from protocol.gossip.matchmaking import RoundSnapshot
from protocol.membership.book import Fault
from protocol.outcomes import RefusalReason
from protocol.wire.messages import Accept, Join, Piece, Received, Vector
from protocol.wire.versions import GOSSIP
from simulation.network import LinkModel, SimulatedInternet, SimulatedNetwork
from simulation.work import SimulatedWork

GROUP, LAYOUT = "ab" * 16, "12" * 16
ROUNDS = (3, 11)
"""Of the two peers: each numbers its own."""
STEP, H = 40, 10
PIECE = 4096
PARAMETERS = 128 * 320
BOUNDS: dict[str, Any] = {"fresh_s": 0.0, "search_s": 5.0, "exchange_s": 60.0}
IDS = [peer_id_from_public_key(bytes([n]) * 32) for n in (1, 2)]
NAME = exchange_id(GROUP, (IDS[0], ROUNDS[0]), (IDS[1], ROUNDS[1]))
LINK = LinkModel(latency_s=0.02, bandwidth_bytes_per_s=2e6)


def agreement(parameters: int = PARAMETERS, codec: str = "int8", vectors: int = 1) -> Agreement:
    return Agreement(GROUP, H, LAYOUT, codec, vectors, parameters)


def contribution(seed: int, parameters: int = PARAMETERS) -> OwnVector:
    """Codes of noise, different for each seed; seeds 1 and 2 are of the first and second peer."""
    codec = get_codec("int8")
    codes = np.empty(codec.code_bytes(parameters), dtype=np.uint8)
    noise_P = torch.randn(parameters, generator=torch.manual_seed(seed))
    codec.encode(noise_P, torch.from_numpy(codes))
    payload = memoryview(codes.tobytes())
    digest = blake3.blake3(payload).hexdigest(length=16)
    return OwnVector(
        round=ROUNDS[(seed - 1) % 2],
        step=STEP,
        final=False,
        steps=1,
        tokens=1,
        digest=digest,
        payload=payload,
    )


class Candidates:
    """The other peers, as the test says, and what is told to them."""

    def __init__(self, *others: PeerId) -> None:
        self.others = others
        self.free_now: dict[PeerId, RoundSnapshot] = {}
        self.announced: list[RoundSnapshot | None] = []
        self.others_ended = False
        self.blamed: list[tuple[PeerId, Fault]] = []
        self._changed = trio.Event()

    def free(self) -> Sequence[tuple[PeerId, RoundSnapshot]]:
        return tuple(self.free_now.items())

    def present(self, *, ended: bool) -> Sequence[PeerId]:
        return self.others if ended == self.others_ended else ()

    def announce(self, snapshot: RoundSnapshot | None) -> None:
        self.announced.append(snapshot)

    def blame(self, peer_id: PeerId, fault: Fault) -> None:
        self.blamed.append((peer_id, fault))

    async def changed(self) -> None:
        await self._changed.wait()

    def tell(self, peer_id: PeerId, snapshot: RoundSnapshot) -> None:
        """That peer is free, with this."""
        self.free_now[peer_id] = snapshot
        self.ring()

    def ring(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


@dataclass
class Peer:
    """A real peer with its round closed."""

    network: SimulatedNetwork
    gossip: Gossip
    exchanges: Exchanges
    meetings: FinalMeetings
    candidates: Candidates
    refused: Counter[RefusalReason]
    own: OwnVector
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    outcome: RoundOutcome | None = None
    ended_s: float = 0.0

    async def average(self, *free: OwnVector) -> None:
        """Average with whoever asks, or with the other peer if it is known to be free."""
        for other in free:
            self.candidates.tell(self.candidates.others[0], other.snapshot)
        with self.scope:
            self.outcome = (await self.gossip.average(self.own, **BOUNDS)).outcome
        self.ended_s = trio.current_time()


@asynccontextmanager
async def real_peer(
    network: SimulatedNetwork,
    seed: int,
    parameters: int = PARAMETERS,
    *,
    agreed: Agreement | None = None,
    own: OwnVector | None = None,
    facts: PackingFacts | None = None,
) -> AsyncIterator[Peer]:
    log = EventLog(lambda _: None, peer=network.peer_id, wall_time_s=lambda: 0.0, stream=None)
    agreed = agreed or agreement(parameters)
    candidates = Candidates(*(peer_id for peer_id in IDS if peer_id != network.peer_id))
    refused: Counter[RefusalReason] = Counter()
    gossip = Gossip(
        agreed,
        network,
        SimulatedWork(),
        candidates=candidates,
        events=log,
        refused=refused,
        packing=facts,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(GossipServer(network, [gossip]).run)
        await trio.sleep(0.01)
        parts = (network, gossip, gossip.exchanges, gossip.meetings, candidates, refused)
        yield Peer(*parts, own or contribution(seed, parameters))
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def two_networks() -> AsyncIterator[tuple[SimulatedNetwork, SimulatedNetwork]]:
    async with two_networks_of(SimulatedInternet(seed=1, link=LINK)) as networks:
        yield networks


@asynccontextmanager
async def two_networks_of(
    internet: SimulatedInternet,
) -> AsyncIterator[tuple[SimulatedNetwork, SimulatedNetwork]]:
    async with internet.open_network(IDS[0]) as a, internet.open_network(IDS[1]) as b:
        await a.connect(b.peer_id, b.addresses)
        yield a, b


@dataclass
class Rogue:
    """Proposes to a real peer, and then does what the test wants."""

    network: SimulatedNetwork
    own: OwnVector
    talk: Conversation
    accept: Accept

    async def say_head(self) -> None:
        await self.talk.send(Vector(NAME, 1, 1, "int8", 1, self.own.digest))

    async def join(self, exchange: str = NAME) -> Conversation:
        stripe = Conversation(await self.network.open_stream(IDS[1], GOSSIP))
        await stripe.send(Join(exchange))
        return stripe

    def starts(self) -> list[int]:
        return list(range(0, len(self.own.payload), PIECE))

    async def say_piece(self, stripe: Conversation, start: int) -> None:
        await stripe.send(Piece(start), self.own.payload[start : start + PIECE])

    async def hear_pieces(self, stripe: Conversation, into: bytearray) -> None:
        """Everything that comes on one stripe, until it ends."""
        while True:
            piece, data = await stripe.receive(Piece)
            into[piece.start : piece.start + len(data)] = data

    async def finish(self) -> None:
        """Both receipts, after both vectors."""
        head, _ = await self.talk.receive(Vector)
        receipt, _ = await self.talk.receive(Received)
        assert receipt.digest == self.own.digest
        await self.talk.send(Received(NAME, head.digest))


@asynccontextmanager
async def rogue(stripes: int = 8) -> AsyncIterator[tuple[Rogue, Peer]]:
    """A rogue whose proposal was accepted by a real peer."""
    async with (
        two_networks() as (a, b),
        real_peer(b, seed=2) as peer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(peer.average)
        await trio.sleep(0.1)  # it is free, and waits to be asked
        own = contribution(1)
        proposal = replace(agreement().proposal(own), stripes=stripes)
        talk = Conversation(await a.open_stream(b.peer_id, GOSSIP))
        await talk.send(proposal)
        accept, _ = await talk.receive(Accept)
        yield Rogue(a, own, talk, accept), peer
