"""One round of the real gossip and exchange code for a whole swarm, on the simulated network.

All peers close a round at the same moment. Each hears of everybody, or in a larger swarm of as many
as it may be linked with, and hears as late as the latency says who is free. Payloads are as large
as said, divided by SCALE as the bandwidth is, so that seconds stay what they are and memory small.
"""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import blake3
import torch
import trio
from trio.testing import wait_all_tasks_blocked

from peer.averaging.gossip.exchange_session import Averaged, OwnVector
from peer.averaging.gossip.exchanges import Agreement
from peer.averaging.gossip.gossip import Gossip, GossipServer
from peer.codec import get_codec
from peer.observe.events import EventLog
from protocol.gossip.matchmaking import RoundSnapshot
from protocol.limits import MAX_LINKS
from simulation.network import LinkModel, SimulatedInternet, SimulatedNetwork
from simulation.swarm import identity_of
from simulation.virtual_time import run_in_virtual_time
from simulation.work import SimulatedWork

from .company import INNER_STEPS, Neighbour, gossip_of

PARAMETERS: Final = 1_050_624
SCALE: Final = 4
SEARCH_S: Final = 30.0
EXCHANGE_S: Final = 60.0
DIGEST: Final = "0" * 32


@dataclass(slots=True)
class Seen:
    """Times that the peers that found a partner needed.

    Attributes:
        payload_bytes: of one vector, unscaled.
        computed_s: real seconds of the simulation.
    """

    payload_bytes: int
    match_s: list[float] = field(default_factory=list)
    exchange_s: list[float] = field(default_factory=list)
    computed_s: float = 0.0


def average_all(peers: int, seed: int, *, latency_s: float, bytes_per_s: float) -> Seen:
    """Let `peers` average one round in pairs."""
    model = LinkModel(latency_s=latency_s, bandwidth_bytes_per_s=bytes_per_s / SCALE)
    began_s = time.perf_counter()
    seen = run_in_virtual_time(seed, lambda: _average_all(peers, seed, model))
    seen.computed_s = time.perf_counter() - began_s
    return seen


async def _average_all(peers: int, seed: int, model: LinkModel) -> Seen:
    internet = SimulatedInternet(seed, link=model)
    agreement = Agreement(DIGEST, INNER_STEPS, DIGEST, "int8", 1, PARAMETERS // SCALE)
    seen = Seen(agreement.payload_bytes * SCALE)
    async with AsyncExitStack() as stack:
        networks = [
            await stack.enter_async_context(
                internet.open_network(identity_of(seed, f"peer{number}").peer_id)
            )
            for number in range(peers)
        ]
        async with trio.open_nursery() as nursery:
            swarm = _Swarm(networks, nursery, model.latency_s)
            await swarm.connect()
            gossips = [swarm.gossip(agreement, number) for number in range(peers)]
            for network, gossip in zip(networks, gossips, strict=True):
                nursery.start_soon(GossipServer(network, [gossip]).run)
            await wait_all_tasks_blocked()  # all serve
            await _average_at_once(gossips, _contribution(agreement), seen)
            nursery.cancel_scope.cancel()
    return seen


class _Swarm:
    """The peers of a swarm: each hears of some, and a little late."""

    def __init__(
        self, networks: Sequence[SimulatedNetwork], nursery: trio.Nursery, latency_s: float
    ) -> None:
        self._networks = networks
        self._nursery = nursery
        self._latency_s = latency_s
        self._views = [
            [(number + step) % len(networks) for step in _steps(len(networks))]
            for number in range(len(networks))
        ]
        self._candidates = [
            Neighbour([networks[other].peer_id for other in view], partial(self._tell, number))
            for number, view in enumerate(self._views)
        ]

    async def connect(self) -> None:
        for network, view in zip(self._networks, self._views, strict=True):
            for other in view:
                await network.connect(
                    self._networks[other].peer_id, self._networks[other].addresses
                )

    def gossip(self, agreement: Agreement, number: int) -> Gossip:
        network = self._networks[number]
        events = EventLog(
            lambda _: None, peer=network.peer_id, wall_time_s=trio.current_time, stream=None
        )
        return gossip_of(
            agreement,
            candidates=self._candidates[number],
            network=network,
            work=SimulatedWork(),
            events=events,
        )

    def _tell(self, number: int, snapshot: RoundSnapshot | None) -> None:
        self._nursery.start_soon(self._deliver, number, snapshot)

    async def _deliver(self, number: int, snapshot: RoundSnapshot | None) -> None:
        await trio.sleep(self._latency_s)
        for other in self._views[number]:  # links go both ways
            self._candidates[other].hear(self._networks[number].peer_id, snapshot)


async def _average_at_once(gossips: Sequence[Gossip], own: OwnVector, seen: Seen) -> None:
    async with trio.open_nursery() as nursery:
        for gossip in gossips:
            nursery.start_soon(_average, gossip, own, seen)


async def _average(gossip: Gossip, own: OwnVector, seen: Seen) -> None:
    settled = await gossip.average(own, fresh_s=0.0, search_s=SEARCH_S, exchange_s=EXCHANGE_S)
    if isinstance(settled.outcome, Averaged):
        seen.match_s.append(settled.match_s)
        seen.exchange_s.append(settled.exchange_s)


def _steps(peers: int) -> list[int]:
    """Links of a peer as steps around a ring: to everybody, or to the nearest on each side."""
    others = list(range(1, peers))
    near = MAX_LINKS // 2
    return others if len(others) <= MAX_LINKS else [*others[:near], *others[-near:]]


def _contribution(agreement: Agreement) -> OwnVector:
    payload = memoryview(bytearray(agreement.payload_bytes))
    codes = torch.frombuffer(payload, dtype=torch.uint8)
    get_codec(agreement.codec).encode(torch.zeros(agreement.padded_parameters), codes)
    digest = blake3.blake3(payload).hexdigest(length=16)
    return OwnVector(
        round=0,
        step=INNER_STEPS,
        final=False,
        steps=1,
        tokens=1,
        digest=digest,
        payload=payload,
    )
