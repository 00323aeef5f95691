"""A peer that opens streams without end is served at a pace; another one is not held up by it."""

import pytest
import trio

from peer.runtime import Network, PeerId, Stream
from protocol.errors import LocoError
from protocol.limits import INBOUND_PACE
from protocol.membership.book import Fault
from protocol.wire.messages import Refusal
from protocol.wire.versions import CONTENT
from simulation.network import SimulatedInternet
from simulation.swarm import identity_of

SERVER, FLOODER, OTHER = (identity_of(1, name).peer_id for name in ("server", "flooder", "other"))
BURST = int(INBOUND_PACE.per_peer * INBOUND_PACE.burst_s)
MORE, AT_ONCE = 200, 20
"""Without a pace they would take 1.2 s."""


class Lenient:
    """A judge that has nothing against anybody."""

    def refusal_of(self, peer_id: PeerId) -> Refusal | None:
        return None

    def conduct_refusal_of(self, peer_id: PeerId) -> Refusal | None:
        return None

    def wait_s(self, peer_id: PeerId) -> float:
        return 0.0

    def blame(self, peer_id: PeerId, fault: Fault) -> None:
        raise AssertionError("nobody broke a rule")


async def open_streams(network: Network, count: int) -> float:
    """One after another, each until it was served; how long that took."""
    began_s = trio.current_time()
    for _ in range(count):
        stream = await network.open_stream(SERVER, CONTENT)
        try:
            while await stream.receive_some():
                pass
        except LocoError:
            pass
        await stream.aclose()
    return trio.current_time() - began_s


async def test_who_opens_streams_without_end_waits_for_its_turn(autojump_clock):
    async def serve(stream: Stream) -> None:
        await stream.send_all(b"served")

    internet = SimulatedInternet(1)
    async with (
        internet.open_network(SERVER) as server,
        internet.open_network(FLOODER) as flooder,
        internet.open_network(OTHER) as other,
    ):
        server.admit_by(Lenient())
        await server.serve(CONTENT, serve)
        for network in (flooder, other):
            await network.connect(SERVER, server.addresses)
        free_s, began_s = await open_streams(other, 1), trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(open_streams, flooder, (BURST + MORE) // AT_ONCE)
            await trio.sleep(1.5)
            assert await open_streams(other, 1) == pytest.approx(free_s)
        assert trio.current_time() - began_s >= MORE / INBOUND_PACE.per_peer
