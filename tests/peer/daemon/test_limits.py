"""Limits of the line in whole swarms: they hold, and cost nobody its place."""

from typing import Any

import numpy as np
import pytest
import trio
from swarm_worlds import simulated, start, toy_spec

from peer.network.pacing import WIRE_FACTOR, BandwidthLimits
from peer.observe.event_names import EventName
from protocol.run.run_spec import RunSpec
from simulation.machine import Machine
from simulation.swarm import SimulatedPeer, SwarmOptions, open_swarm

pytestmark = pytest.mark.slow

MBIT = 125_000.0
LIMIT_MBPS = 2.0
SLACK = 1.05  # acknowledgements and what is charged late
OPTIONS = SwarmOptions(padded_parameters=12 * 16384)
LIMITED = Machine(limits=BandwidthLimits(LIMIT_MBPS, LIMIT_MBPS))


def spec(method: str, rounds: int = 3) -> RunSpec:
    """Rounds of 10 s. A joiner has 6.5 Mbit to fetch, a peer about 2 Mbit to send in a round."""
    section: dict[str, Any] = {"diloco": {"blocks_per_fragment": 2, "overlap_steps": 20}}
    return toy_spec(rounds, 100, method=method, **(section if method == "diloco" else {}))


class Meter:
    """What a peer's streams carried in each second."""

    def __init__(self, peer: SimulatedPeer) -> None:
        self._peer = peer
        self.sent: list[int] = []
        self.received: list[int] = []

    async def run(self) -> None:
        """Look each second, until cancelled."""
        while True:
            statistics = self._peer.network.statistics()
            self.sent.append(sum(statistics.sent_bytes.values()))
            self.received.append(sum(statistics.received_bytes.values()))
            await trio.sleep(1)

    def most(self, totals: list[int], seconds: int) -> float:
        """Largest rate over so many seconds, in Mbit/s on the interface."""
        rates = np.subtract(totals[seconds:], totals[:-seconds]) * WIRE_FACTOR / seconds / MBIT
        return float(rates.max())


@pytest.mark.parametrize("method", ["noloco", "diloco"])
@simulated()
async def test_the_limits_of_a_peer_hold_and_cost_it_nothing_else(tmp_path, method):
    async with (
        open_swarm(1, spec(method), tmp_path, OPTIONS) as swarm,
        trio.open_nursery() as nursery,
    ):
        await start(swarm, "a")
        swarm.join("b", LIMITED)
        await swarm.until(lambda: hasattr(swarm["b"], "network"))
        meter = Meter(swarm["b"])
        nursery.start_soon(meter.run)
        await swarm.finished()
        nursery.cancel_scope.cancel()
        for totals in (meter.sent, meter.received):
            assert meter.most(totals, 5) < SLACK * LIMIT_MBPS
            assert meter.most(totals, 1) < 1.25 * LIMIT_MBPS
        assert meter.most(meter.received, 3) > 0.9 * LIMIT_MBPS, "joining takes what it may"
        for name in "ab":
            assert not swarm[name].events(EventName.PEER_LOST)
        if method == "diloco":
            a, b = swarm["a"], swarm["b"]
            np.testing.assert_array_equal(a.slow_weights(), b.slow_weights())


@simulated()
async def test_any_byte_is_a_sign_of_life(tmp_path, monkeypatch):
    async with open_swarm(1, spec("diloco"), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b")
        monkeypatch.setattr(swarm["b"].links, "_beat", lambda: None)
        await swarm.until(lambda: swarm["a"].facts.round == 2)
        assert not swarm["a"].events(EventName.PEER_LOST)
