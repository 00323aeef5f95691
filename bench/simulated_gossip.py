"""One round of the real gossip and exchange code for a whole swarm, on the simulated network.

All peers close the same round at the same moment. Each sees everybody, or in a larger swarm as many
as it may be linked with. Payloads are as large as
said, divided by SCALE as the bandwidth is, so that seconds stay what they are and memory small.
"""

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

import blake3
import torch
import trio
from trio.testing import wait_all_tasks_blocked

from peer.averaging.exchange_io import Contribution
from peer.averaging.gossip import Gossip
from peer.averaging.outcome import Agreement, Averaged
from peer.codec import get_codec
from peer.network.simulated import SimulatedInternet, SimulatedNetwork
from peer.network.simulated_link import LinkModel
from peer.observe.events import EventLog
from peer.ports import PeerId
from peer.simulated_ports import SimulatedWork
from peer.simulation.swarm import identity_of
from peer.simulation.virtual_time import run_in_virtual_time
from protocol.limits import MAX_LINKS

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
    agreement = Agreement(DIGEST, DIGEST, "int8", 1, PARAMETERS // SCALE)
    seen = Seen(agreement.payload_bytes * SCALE)
    async with AsyncExitStack() as stack:
        networks = [
            await stack.enter_async_context(
                internet.open_network(identity_of(seed, f"peer{number}").peer_id)
            )
            for number in range(peers)
        ]
        async with trio.open_nursery() as nursery:
            swarm = []
            for number, network in enumerate(networks):
                view = [networks[(number + step) % peers] for step in _steps(peers)]
                for other in view:
                    await network.connect(other.peer_id, other.addresses)
                gossip = _gossip(agreement, network)
                nursery.start_soon(gossip.run)
                swarm.append((gossip, [other.peer_id for other in view]))
            await wait_all_tasks_blocked()  # all serve
            await _average_at_once(swarm, _contribution(agreement), seen)
            nursery.cancel_scope.cancel()
    return seen


async def _average_at_once(
    swarm: list[tuple[Gossip, list[PeerId]]], own: Contribution, seen: Seen
) -> None:
    async with trio.open_nursery() as nursery:
        for gossip, view in swarm:
            nursery.start_soon(_average, gossip, own, view, seen)


async def _average(gossip: Gossip, own: Contribution, view: list[PeerId], seen: Seen) -> None:
    gossip.round_opened(own.round)
    outcome = await gossip.average(own, view, search_s=SEARCH_S, exchange_s=EXCHANGE_S)
    if isinstance(outcome, Averaged):
        seen.match_s.append(gossip.last_timing.match_s)
        seen.exchange_s.append(gossip.last_timing.exchange_s)


def _steps(peers: int) -> list[int]:
    """Links of a peer as steps around a ring: to everybody, or to the nearest on each side."""
    others = list(range(1, peers))
    near = MAX_LINKS // 2
    return others if len(others) <= MAX_LINKS else [*others[:near], *others[-near:]]


def _gossip(agreement: Agreement, network: SimulatedNetwork) -> Gossip:
    events = EventLog(
        lambda _: None, peer=network.peer_id, wall_time_s=trio.current_time, stream=None
    )
    return Gossip(agreement, network=network, work=SimulatedWork(), events=events)


def _contribution(agreement: Agreement) -> Contribution:
    payload = memoryview(bytearray(agreement.payload_bytes))
    codes = torch.frombuffer(payload, dtype=torch.uint8)
    get_codec(agreement.codec).encode(torch.zeros(agreement.padded_parameters), codes)
    digest = blake3.blake3(payload).hexdigest(length=16)
    return Contribution(0, 1, 1, agreement.codec, agreement.vectors, digest, payload)
