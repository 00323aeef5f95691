"""Outputs that are compared with a partner's, in simulated swarms."""

import itertools
import math
from pathlib import Path

import pytest
from existing import existing
from swarm_worlds import final_outcomes, simulated, start, toy_spec

from peer.averaging.gossip.comparisons import MAX_SHARE
from peer.observe.event_names import EventName
from peer.simulation.machine import Machine
from peer.simulation.peer import SimulatedPeer
from peer.simulation.swarm import open_swarm
from peer.training.toy import SimulatedSpeed

COST_S = SimulatedSpeed().comparison_s
FIRST_S = SimulatedSpeed().step_s / MAX_SHARE
NAMES = ("a", "b", "c", "d")


def assert_seldom(peer: SimulatedPeer) -> None:
    """That all comparisons together, each with its wait, take the share that they may."""
    (started, *_) = peer.events(EventName.TRAINER_STARTED)
    compared = peer.events(EventName.OUTPUTS_COMPARED)
    moments = [started["monotonic_s"], *(event["monotonic_s"] for event in compared)]
    waits = [after - before for before, after in itertools.pairwise(moments)]
    assert waits[0] >= FIRST_S
    assert all(wait >= COST_S / MAX_SHARE for wait in waits[1:])
    assert sum(event["seconds"] for event in compared) <= MAX_SHARE * (moments[-1] - moments[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["noloco", "gasloc"])
def test_a_swarm_compares_now_and_then_and_shows_it(tmp_path: Path, method: str) -> None:
    @simulated()
    async def run() -> None:
        async with open_swarm(1, toy_spec(30, method=method), tmp_path) as swarm:
            await start(swarm, *NAMES)
            await swarm.finished()
            for peer in (swarm[name] for name in NAMES):
                compared = peer.events(EventName.OUTPUTS_COMPARED)
                assert len(compared) >= 3
                assert_seldom(peer)
                rounds = {event["round"]: event for event in peer.events(EventName.ROUND_AVERAGED)}
                for event in compared:
                    assert event["partner"] == rounds[event["round"]]["partner"]
                    assert 0 < event["divergence"] < math.log(2)
                outputs, status = peer.facts.outputs, peer.status()
                assert outputs.comparisons == len(compared)
                assert outputs.divergence == compared[-1]["divergence"]
                assert existing(status.outputs)["divergence"] == outputs.divergence

    run()


@simulated()
async def test_a_short_run_compares_nothing(tmp_path: Path) -> None:
    async with open_swarm(1, toy_spec(4), tmp_path) as swarm:
        await start(swarm, "a", "b")
        await swarm.finished()
        for peer in (swarm["a"], swarm["b"]):
            assert peer.events(EventName.OUTPUTS_COMPARED) == []
            assert peer.status().outputs is None
            assert "averaged" in final_outcomes(peer)


@pytest.mark.parametrize("method", ["diloco", "streaming"])
def test_with_fragments_nothing_is_compared(tmp_path: Path, method: str) -> None:
    @simulated()
    async def run() -> None:
        async with open_swarm(1, toy_spec(20, method=method), tmp_path) as swarm:
            await start(swarm, "a", "b")
            await swarm.finished()
            for peer in (swarm["a"], swarm["b"]):
                assert peer.facts.averaged
                assert peer.facts.outputs.comparisons == 0

    run()


@pytest.mark.slow
@simulated()
async def test_a_slow_comparison_comes_more_seldom(tmp_path: Path) -> None:
    slow = Machine(SimulatedSpeed(comparison_s=0.2))
    async with open_swarm(1, toy_spec(60), tmp_path) as swarm:
        await start(swarm, "a", "b", machine_of={"b": slow})
        await swarm.finished()
        a, b = (swarm[name].facts.outputs for name in ("a", "b"))
        assert 1 < b.comparisons <= a.comparisons / 2
        assert b.spent_s == pytest.approx(0.2 * b.comparisons)


@pytest.mark.slow
def test_a_trainer_that_dies_takes_no_comparison_with_it(tmp_path: Path) -> None:
    """One that dies in the very step at whose end it would compare; its next life compares."""

    async def run(folder: Path, dies: frozenset[int], rounds: int) -> SimulatedPeer:
        async with open_swarm(1, toy_spec(rounds), folder) as swarm:
            failing = Machine(SimulatedSpeed(die_at_steps=dies))
            await start(swarm, "a", "b", machine_of={"b": failing})
            await swarm.finished()
            return swarm["b"]

    found: list[SimulatedPeer] = []

    @simulated()
    async def undisturbed() -> None:
        found.append(await run(tmp_path / "undisturbed", frozenset(), 30))

    undisturbed()
    (started,) = found[0].events(EventName.TRAINER_STARTED)
    first_s = found[0].events(EventName.OUTPUTS_COMPARED)[0]["monotonic_s"]
    at_step = round((first_s - started["monotonic_s"]) / SimulatedSpeed().step_s)

    @simulated()
    async def disturbed() -> None:
        found.append(await run(tmp_path / "disturbed", frozenset({at_step}), 150))

    disturbed()
    died = found[1].events(EventName.TRAINER_DIED)
    compared = found[1].events(EventName.OUTPUTS_COMPARED)
    assert [event["monotonic_s"] for event in died] == pytest.approx([first_s], abs=0.1)
    assert len(compared) >= 2
    assert compared[0]["monotonic_s"] > first_s
    assert found[1].failure is None
