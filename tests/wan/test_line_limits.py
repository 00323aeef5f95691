"""The limits of the line hold on the network interface, p2pd and directory included.

Bound, set before anything was measured: over any 5 s the interface carries no more than the limit.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm import RUN_SPEC, START_S, Peer, Swarm

from bench.shaped_network import AccessLink, ShapedNetwork, Traffic, missing, shaped_network
from peer.observe.event_names import EventName

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

LIMITS_MBPS = {"sent_bytes": 2.0, "received_bytes": 4.0}
WINDOW_S = 5.0
LOOK_EVERY_S = 0.5
FEW_FRAMES_MBIT = 0.1  # counters are read a moment before or after their time
SPEC = (
    RUN_SPEC.replace("hidden_size = 32", "hidden_size = 128")
    .replace("intermediate_size = 64", "intermediate_size = 256")
    .replace("inner_steps = 150", "inner_steps = 30")
)
"""An exchange is of 1.6 Mbit each way, a round lasts about half a second."""


@pytest.fixture
def hosts() -> Iterator[ShapedNetwork]:
    with shaped_network([AccessLink()] * 2) as network:
        yield network


@pytest.fixture
def peers(hosts: ShapedNetwork, tmp_path: Path) -> Iterator[tuple[Peer, Peer]]:
    """A founder on one host, and on the other a joiner with limits."""
    swarm = Swarm(tmp_path, SPEC)
    limits = {
        "LOCO_MAX_UPLOAD_MBPS": f"{LIMITS_MBPS['sent_bytes']}",
        "LOCO_MAX_DOWNLOAD_MBPS": f"{LIMITS_MBPS['received_bytes']}",
    }
    try:
        founder = swarm.found(listen=f"{hosts.address(0)}:0", prefix=hosts.command(0, []))
        joiner = swarm.join(
            founder,
            listen=f"{hosts.address(1)}:0",
            prefix=hosts.command(1, []),
            environment=swarm.environment | limits,
        )
        yield founder, joiner
    finally:
        swarm.close()


def watched(hosts: ShapedNetwork, host: int, sent_mbit: float) -> list[tuple[float, Traffic]]:
    """When, and what the host's interface had carried by then, until it has sent so much."""
    began_s, seen = time.monotonic(), [(0.0, hosts.traffic(host))]
    while seen[-1][1].sent_bytes * 8e-6 < sent_mbit:
        time.sleep(LOOK_EVERY_S)
        seen.append((time.monotonic() - began_s, hosts.traffic(host)))
        assert seen[-1][0] < START_S, "it sent so little in all the time"
    return seen


def most_mbit(seen: list[tuple[float, Traffic]], counter: str) -> float:
    """Most megabits within WINDOW_S."""
    carried = [(at_s, getattr(traffic, counter) * 8e-6) for at_s, traffic in seen]
    return max(
        later - now
        for at_s, now in carried
        for later_s, later in carried
        if 0 <= later_s - at_s <= WINDOW_S
    )


def test_the_interface_carries_no_more_than_the_limits(
    hosts: ShapedNetwork, peers: tuple[Peer, Peer]
) -> None:
    # First weights, data and state come in this time, then vectors both ways.
    seen = watched(hosts, 1, sent_mbit=2 * LIMITS_MBPS["sent_bytes"] * WINDOW_S)
    for counter, limit_mbps in LIMITS_MBPS.items():
        assert most_mbit(seen, counter) <= limit_mbps * WINDOW_S + FEW_FRAMES_MBIT
    assert not any(peer.events(EventName.PEER_LOST) for peer in peers)
