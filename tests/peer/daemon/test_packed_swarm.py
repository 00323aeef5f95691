"""Whole swarms whose pairs send int8 codes as differences: each way in pairs, and lost streams."""

from typing import Any

import pytest
from swarm_worlds import simulated, start, toy_spec

from peer.facts import PackingFacts
from protocol.outcomes import SkipReason
from simulation.swarm import SimulatedPeer, open_swarm

pytestmark = pytest.mark.slow
NAMES = ("p0", "p1", "p2", "p3")


def all_of(peers: list[SimulatedPeer]) -> PackingFacts:
    """Their counts, added up."""
    counts: dict[str, int] = {}
    for peer in peers:
        for name in PackingFacts.__slots__:
            counts[name] = counts.get(name, 0) + getattr(peer.facts.packing, name)
    return PackingFacts(**counts)


@pytest.mark.parametrize(
    "sync",
    [
        pytest.param({"method": "noloco"}, marks=pytest.mark.long),
        {"method": "noloco", "gamma": 0.9},
        {"method": "streaming"},
    ],
    ids=["noloco", "two vectors", "streaming"],
)
def test_pairs_of_each_way_send_differences(tmp_path, sync: dict[str, Any]):
    @simulated()
    async def run() -> None:
        spec = toy_spec(10, codec="int8-diff", **sync)
        async with open_swarm(1, spec, tmp_path) as swarm:
            await start(swarm, *NAMES)
            await swarm.finished()
            peers = list(swarm.peers.values())
            for peer in peers:
                bad = {SkipReason.BAD_VECTOR, SkipReason.UNSETTLED, SkipReason.IMPLAUSIBLE}
                assert not bad & set(peer.facts.skipped)
                assert not peer.facts.faults
            counts = all_of(peers)
            assert counts.packed > len(NAMES)
            assert counts.whole == 0
            assert counts.misread < counts.blocks
            assert counts.sent_bytes < counts.code_bytes

    run()


def test_a_run_in_int8_packs_nothing(tmp_path):
    @simulated()
    async def run() -> None:
        async with open_swarm(1, toy_spec(3), tmp_path) as swarm:
            await start(swarm, *NAMES[:2])
            await swarm.finished()
            assert all_of(list(swarm.peers.values())) == PackingFacts()

    run()
