"""A line that averages fill for good is no silence: nobody is lost behind it, and rounds go on.

No limit is set, so vectors take all that the line gives, and what keeps links alive has to get
through between them.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm import RUN_SPEC, START_S, Peer, Swarm

from bench.shaped_network import AccessLink, ShapedNetwork, missing, shaped_network
from peer.observe.event_names import EventName

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

UP_MBPS, DOWN_MBPS = 1.0, 2.0
WATCH_S = 60.0
FULL = 0.8
SPEC = (
    RUN_SPEC.replace("hidden_size = 32", "hidden_size = 128")
    .replace("intermediate_size = 64", "intermediate_size = 256")
    .replace("inner_steps = 150", "inner_steps = 30")
)
"""An exchange is of 1.6 Mbit each way, a round lasts about half a second."""


@pytest.fixture
def hosts() -> Iterator[ShapedNetwork]:
    thin = AccessLink(UP_MBPS * 1e6, DOWN_MBPS * 1e6)
    with shaped_network([AccessLink(), thin]) as network:
        yield network


@pytest.fixture
def peers(hosts: ShapedNetwork, tmp_path: Path) -> Iterator[tuple[Peer, Peer]]:
    swarm = Swarm(tmp_path, SPEC)
    try:
        founder = swarm.found(listen=f"{hosts.address(0)}:0", prefix=hosts.command(0, []))
        thin = swarm.join(founder, listen=f"{hosts.address(1)}:0", prefix=hosts.command(1, []))
        yield founder, thin
    finally:
        swarm.close()


def test_nobody_is_lost_behind_a_full_line(hosts: ShapedNetwork, peers: tuple[Peer, Peer]) -> None:
    for peer in peers:
        peer.wait_event(EventName.ROUND_AVERAGED, START_S)
    before = hosts.traffic(1).sent_bytes
    averaged = len(peers[1].events(EventName.ROUND_AVERAGED))
    time.sleep(WATCH_S)  # what is tested is that nothing happens in it
    sent_mbps = (hosts.traffic(1).sent_bytes - before) * 8e-6 / WATCH_S
    assert sent_mbps >= FULL * UP_MBPS, "the line was not full"
    assert not any(peer.events(EventName.PEER_LOST) for peer in peers)
    assert len(peers[1].events(EventName.ROUND_AVERAGED)) >= averaged + 10
