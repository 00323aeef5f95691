"""Two peers that gossip in virtual time: real ones, and one that keeps to no rules."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import blake3
import numpy as np
import torch
import trio

from peer.averaging.exchange_io import Contribution
from peer.averaging.gossip import Gossip
from peer.averaging.outcome import Agreement, Outcome
from peer.codec import get_codec
from peer.network.conversation import Conversation
from peer.network.simulated import SimulatedInternet, SimulatedNetwork
from peer.network.simulated_link import LinkModel
from peer.observe.events import EventLog
from peer.simulated_ports import SimulatedWork
from protocol.messages import Accept, Join, Piece, Propose, Received, Vector
from protocol.peer_id import peer_id_from_public_key
from protocol.versions import GOSSIP

GROUP, LAYOUT = "ab" * 16, "12" * 16
ROUND = 1
PIECE = 4096
PARAMETERS = 128 * 320
SEARCH_S = 5.0
EXCHANGE_S = 60.0
IDS = [peer_id_from_public_key(bytes([n]) * 32) for n in (1, 2)]
LINK = LinkModel(latency_s=0.02, bandwidth_bytes_per_s=2e6)


def agreement(parameters: int = PARAMETERS) -> Agreement:
    return Agreement(GROUP, LAYOUT, "int8", 1, parameters)


def contribution(seed: int, parameters: int = PARAMETERS) -> Contribution:
    """Codes of noise, different for each seed."""
    codec = get_codec("int8")
    codes = np.empty(codec.code_bytes(parameters), dtype=np.uint8)
    noise_P = torch.randn(parameters, generator=torch.manual_seed(seed))
    codec.encode(noise_P, torch.from_numpy(codes))
    payload = memoryview(codes.tobytes())
    digest = blake3.blake3(payload).hexdigest(length=16)
    return Contribution(ROUND, 1, 1, "int8", 1, digest, payload)


@dataclass
class Peer:
    """A real peer with its round closed."""

    network: SimulatedNetwork
    gossip: Gossip
    own: Contribution
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    outcome: Outcome | None = None
    ended_s: float = 0.0

    async def average(self, *candidates: str) -> None:
        with self.scope:
            self.outcome = await self.gossip.average(
                self.own, candidates, search_s=SEARCH_S, exchange_s=EXCHANGE_S
            )
        self.ended_s = trio.current_time()


@asynccontextmanager
async def real_peer(
    network: SimulatedNetwork, seed: int, parameters: int = PARAMETERS
) -> AsyncIterator[Peer]:
    log = EventLog(lambda _: None, peer=network.peer_id, wall_time_s=lambda: 0.0, stream=None)
    gossip = Gossip(agreement(parameters), network=network, work=SimulatedWork(), events=log)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gossip.run)
        await trio.sleep(0.01)
        gossip.round_opened(ROUND)
        yield Peer(network, gossip, contribution(seed, parameters))
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
    own: Contribution
    talk: Conversation
    accept: Accept

    async def say_head(self) -> None:
        own = self.own
        await self.talk.send(Vector(own.round, 1, 1, own.codec, own.vectors, own.digest))

    async def join(self, group: str = GROUP, round_: int = ROUND) -> Conversation:
        stripe = Conversation(await self.network.open_stream(IDS[1], GOSSIP))
        await stripe.send(Join(group, round_))
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
        await self.talk.send(Received(ROUND, head.digest))


@asynccontextmanager
async def rogue(stripes: int = 8) -> AsyncIterator[tuple[Rogue, Peer]]:
    """A rogue whose proposal was accepted by a real peer."""
    async with (
        two_networks() as (a, b),
        real_peer(b, seed=2) as peer,
        trio.open_nursery() as nursery,
    ):
        talk = Conversation(await a.open_stream(b.peer_id, GOSSIP))
        await talk.send(Propose(GROUP, ROUND, LAYOUT, "int8", 1, 1, 1, stripes))
        await trio.sleep(0.1)  # held until the round is closed
        nursery.start_soon(peer.average)
        accept, _ = await talk.receive(Accept)
        yield Rogue(a, contribution(1), talk, accept), peer
