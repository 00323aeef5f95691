"""Peers of simulated swarms say what is wrong, in words, and that it is over."""

import pytest
import trio
from swarm_worlds import simulated, start, toy_spec

from peer.observe.problems import ALONE_ROUNDS, APART_S
from protocol.names import short_id
from simulation.machine import Machine
from simulation.swarm import SimulatedPeer, SimulatedSwarm, open_swarm
from simulation.trainer import SimulatedSpeed

SOON_S = 60.0
"""For links to be tried again, and for lists of peers to pass."""


def wrong(peer: SimulatedPeer) -> dict[str, str]:
    return {problem.name: problem.words for problem in peer.report.status().problems}


def all_wrong(swarm: SimulatedSwarm) -> dict[str, dict[str, str]]:
    return {name: told for name, peer in swarm.peers.items() if (told := wrong(peer))}


@pytest.mark.slow
@simulated()
async def test_nothing_is_wrong_in_a_healthy_swarm_from_its_second_round_to_its_end(tmp_path):
    async with open_swarm(1, toy_spec(rounds=16), tmp_path) as swarm:
        await start(swarm, *"abc")
        told = []
        while min(peer.facts.run_over for peer in swarm.peers.values()) is False:
            told += [all_wrong(swarm)] if all_wrong(swarm) else []
            await trio.sleep(0.5)
        assert told == []
        facts = swarm["b"].facts
        assert len(facts.losses) > 1
        assert facts.lowest_loss == min(facts.losses)
        assert len(facts.distances) == facts.averaged > 10
        assert facts.micro_batches is not None


@pytest.mark.slow
@simulated()
async def test_a_peer_that_others_are_linked_with_and_this_one_is_not_is_told(tmp_path):
    slow = Machine(SimulatedSpeed(step_s=2.0))
    async with open_swarm(1, toy_spec(rounds=40, inner_steps=5), tmp_path) as swarm:
        await start(swarm, *"abc", machine_of=dict.fromkeys("abc", slow))
        await trio.sleep(SOON_S)
        swarm.internet.partition([swarm["b"].peer_id], [swarm["c"].peer_id])
        await trio.sleep(APART_S - 10)
        assert all_wrong(swarm) == {}, "too soon to tell"
        await trio.sleep(SOON_S)
        told = all_wrong(swarm)
        assert {name: list(of) for name, of in told.items()} == {"b": ["split"], "c": ["split"]}
        assert short_id(swarm["c"].peer_id) in told["b"]["split"]
        swarm.internet.heal()
        await trio.sleep(SOON_S)
        assert all_wrong(swarm) == {}


@simulated()
async def test_a_peer_whose_others_have_died_is_alone_and_none_of_them_is_apart(tmp_path):
    async with open_swarm(1, toy_spec(rounds=60), tmp_path) as swarm:
        await start(swarm, *"abc")
        await trio.sleep(10)
        swarm.kill("b")
        swarm.kill("c")
        of, alone = swarm["a"], swarm["a"].facts.round
        await swarm.until(lambda: bool(wrong(of)))
        assert list(wrong(of)) == ["alone"]
        assert of.facts.round >= alone + ALONE_ROUNDS


@simulated()
async def test_a_wrong_clock_is_told_by_the_peer_that_has_it(tmp_path):
    async with open_swarm(1, toy_spec(rounds=20), tmp_path) as swarm:
        await start(swarm, *"abc", machine_of={"c": Machine(clock_skew_s=7.0)})
        words = wrong(swarm["c"])["clock-off"]
        assert words == "the clocks of other peers are 7.0 s behind this machine's"
        await trio.sleep(10)
        assert "clock-off" not in all_wrong(swarm).get("a", {})


@simulated()
async def test_a_joiner_that_reaches_nobody_says_where_until_it_does(tmp_path):
    async with open_swarm(1, toy_spec(rounds=40), tmp_path) as swarm:
        await start(swarm, "a")
        swarm.internet.partition([swarm["a"].peer_id], [swarm.join("b").peer_id])
        await trio.sleep(SOON_S)
        (words,) = wrong(swarm["b"]).values()
        assert words.startswith("nobody was reached at ")
        assert swarm["a"].network.addresses[0] in words
        swarm.internet.heal()
        await swarm.until(swarm["b"].ready.is_set)
        assert wrong(swarm["b"]) == {}
