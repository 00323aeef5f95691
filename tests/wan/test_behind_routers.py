"""Whole peers behind routers train with each other; the routers translate with nftables.

One peer can be dialled. All others come to the run through it, find out by dial-back that nobody
can dial them, and reach each other through it, or inside their own network.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from swarm import RUN_SPEC, START_S, Peer, Swarm

from bench.translated_network import (
    Host,
    Kind,
    Router,
    TranslatedNetwork,
    missing,
    translated_network,
)
from peer.observe.event_names import EventName

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

PORT = 31337
AVERAGES_S = 240.0
"""Three trainers share the machine's processors."""


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path, RUN_SPEC)
    try:
        yield swarm
    finally:
        swarm.close()


def on(host: Host) -> dict[str, Any]:
    """Where a peer runs and listens."""
    return {"listen": f"0.0.0.0:{PORT}", "prefix": host.command([])}


def start(swarm: Swarm, network: TranslatedNetwork, *hosts: Host) -> tuple[Peer, list[Peer]]:
    """A founder on the internet, and a joiner on each of these hosts."""
    founder = swarm.found(**on(network.public[0]))
    return founder, [join(swarm, network, host) for host in hosts]


def join(swarm: Swarm, network: TranslatedNetwork, host: Host) -> Peer:
    """A joiner on this host, through the founder."""
    return swarm.join(f"{network.public[0].address}:{PORT}", **on(host))


def reach(peer: Peer) -> dict[str, Any]:
    told: dict[str, Any] = peer.status()["reach"]
    return told


def has_averaged_with(peer: Peer, other_id: str) -> bool:
    averaged = peer.events(EventName.ROUND_AVERAGED)
    return any(event["partner"] == other_id for event in averaged)


def wait_averaged(one: Peer, other: Peer) -> None:
    other_id = other.peer_id
    one.wait_for("an average", partial(has_averaged_with, one, other_id), AVERAGES_S)


def wait_relayed(peers: list[Peer], founder: Peer) -> None:
    """Until each of them has found out that nobody can dial it, and has a relay."""
    for peer in peers:
        peer.wait_event(EventName.REACHABILITY_CHANGED, START_S, reachable="no")
        peer.wait_for("a relay", lambda peer=peer: reach(peer)["relays"], START_S)  # type: ignore[misc]
        assert reach(peer)["relays"] == [founder.peer_id]


def test_two_behind_symmetric_routers_average_through_a_relay(swarm: Swarm) -> None:
    with translated_network(1, [Router(Kind.SYMMETRIC)] * 2) as network:
        founder, peers = start(swarm, network, network.inside[0][0], network.inside[1][0])
        wait_relayed(peers, founder)
        wait_averaged(*peers)
        assert reach(founder)["reachable"] == "yes"
        founder.wait_for("a circuit that it counts", lambda: reach(founder)["circuits"], START_S)
        assert not any(peer.events(EventName.STREAM_FAILED) for peer in (founder, *peers))


def test_two_behind_one_router_need_no_relay_for_each_other(swarm: Swarm) -> None:
    with translated_network(1, [Router(Kind.CONE, hosts=2)]) as network:
        founder, peers = start(swarm, network, *network.inside[0])
        wait_averaged(*peers)
        assert reach(founder)["circuits"] == 0


def test_behind_a_carrier_and_behind_an_open_router(swarm: Swarm) -> None:
    routers = [Router(Kind.CONE), Router(Kind.CONE, behind=0), Router(Kind.OPEN)]
    with translated_network(1, routers) as network:
        twice, opened = network.inside[1][0], network.inside[2][0]
        founder, [free] = start(swarm, network, opened)
        free.wait_event(EventName.REACHABILITY_CHANGED, START_S, reachable="yes")
        assert reach(free)["observed"] == [network.outer[2]]
        # Earlier it might be `free` that dials, and the other can be dialled through a relay alone.
        deep = join(swarm, network, twice)
        wait_averaged(deep, free)
        deep.wait_event(EventName.REACHABILITY_CHANGED, START_S, reachable="no")
        assert reach(founder)["circuits"] == 0, "the one that can be dialled is dialled"
