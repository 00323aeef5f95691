"""Streaming DiLoCo in whole swarms: everybody holds the same outer copy, whatever happens.

Each fragment is large enough to be averaged in several chunks, with several owners.
"""

from collections import Counter

import numpy as np
import pytest
from swarm_worlds import simulated, start, toy_spec

from peer.observe.event_names import EventName
from peer.observe.status import PeerState
from peer.simulation.peer import SimulatedPeer
from peer.simulation.swarm import SwarmOptions, open_swarm
from protocol.run_spec import RunSpec

pytestmark = pytest.mark.slow

ROUNDS = 6
OPTIONS = SwarmOptions(padded_parameters=6 * 16384)


def fragment_spec(rounds: int = ROUNDS, **diloco: object) -> RunSpec:
    """Three fragments in rounds of 20 steps."""
    section = {"blocks_per_fragment": 2} | diloco
    return toy_spec(rounds, method="diloco", diloco=section)


def returned(peer: SimulatedPeer, after: int = -1) -> list[dict]:
    return [e for e in peer.events(EventName.FRAGMENT_RETURNED) if e["round"] > after]


def contributors(peer: SimulatedPeer, after: int = -1) -> Counter:
    return Counter(event["contributors"] for event in returned(peer, after))


def assert_equal(*peers: SimulatedPeer) -> None:
    first, *others = peers
    for other in others:
        np.testing.assert_array_equal(first.slow_weights(), other.slow_weights())


@simulated()
async def test_two_peers_end_with_the_same_bytes(tmp_path):
    async with open_swarm(1, fragment_spec(), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b")
        await swarm.finished()
        a, b = swarm["a"], swarm["b"]
        assert_equal(a, b)
        for peer in (a, b):
            assert contributors(peer, after=1).keys() == {2}
            assert {event["missing"] for event in returned(peer, after=0)} == {0}
            assert peer.status().state is PeerState.FINISHED
        assert a.status().train_loss < a.events(EventName.ROUND_CLOSED)[0]["loss"]


@simulated()
async def test_a_peer_alone_trains(tmp_path):
    async with open_swarm(1, fragment_spec(), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a")
        await swarm.finished()
        assert contributors(swarm["a"]).keys() == {1}
        assert swarm["a"].facts.skipped == {"no_partner": len(returned(swarm["a"]))}


@simulated()
async def test_five_peers_end_with_the_same_bytes(tmp_path):
    names = "abcde"
    async with open_swarm(1, fragment_spec(), tmp_path, OPTIONS) as swarm:
        await start(swarm, *names)
        await swarm.finished()
        peers = [swarm[name] for name in names]
        assert_equal(*peers)
        for peer in peers:
            assert contributors(peer, after=2).keys() == {5}


@simulated()
async def test_a_late_joiner_heals_and_contributes(tmp_path):
    async with open_swarm(1, fragment_spec(12), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.join("c", through=["b"])
        await swarm.finished()
        a, b, c = (swarm[name] for name in "abc")
        assert_equal(a, b, c)
        assert contributors(a, after=9).keys() == {3}


@simulated()
async def test_a_killed_peer_costs_the_others_nothing_but_its_part(tmp_path):
    async with open_swarm(1, fragment_spec(12), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b", "c")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.kill("c")
        await swarm.finished("a", "b")
        assert_equal(swarm["a"], swarm["b"])
        assert contributors(swarm["a"], after=8).keys() == {2}


@simulated()
async def test_after_a_partition_all_are_equal_again(tmp_path):
    async with open_swarm(1, fragment_spec(20), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b", "c")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.isolate("c")
        await swarm.until(lambda: swarm["a"].facts.round == 10)
        swarm.internet.heal()
        await swarm.finished()
        assert_equal(*(swarm[name] for name in "abc"))
        assert contributors(swarm["a"], after=17).keys() == {3}


@simulated()
async def test_two_peers_that_were_apart_are_equal_again(tmp_path):
    async with open_swarm(1, fragment_spec(20), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.isolate("b")
        await swarm.until(lambda: swarm["a"].facts.round == 10)
        swarm.internet.heal()
        await swarm.finished()
        assert_equal(swarm["a"], swarm["b"])
