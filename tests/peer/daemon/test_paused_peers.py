"""A peer that its user pauses: nobody waits for it, and it goes on where the others are."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from swarm_worlds import STEP_S, distance, simulated, skips, start, toy_spec

from peer.facts import Facts, PeerState
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.process.rejoin import JoinAgain
from peer.rounds.pause import Pause, PauseRefused
from protocol.membership.view import TRUSTED_AFTER_S, Progress, Roster, View
from protocol.run.amendments import AmendedSpec
from protocol.run.run_spec import RunSpec
from protocol.schedule.data_plan import DataPlan
from protocol.schedule.rounds import LOST_LAG_ROUNDS
from simulation.machine import Machine
from simulation.swarm import SimulatedPeer, SimulatedSwarm, open_swarm

pytestmark = pytest.mark.slow

ROUNDS = 16
LONGEST_ROUND_S = 1.6 * 20 * STEP_S
"""A quota is changed by half at most, so that peers come together; waits would be longer."""
WAYS = pytest.mark.parametrize(
    "method", ["noloco", "diloco", pytest.param("streaming", marks=pytest.mark.long)]
)


def spec_of(method: str, rounds: int = ROUNDS) -> RunSpec:
    if method == "diloco":
        return toy_spec(rounds, method=method, diloco={"blocks_per_fragment": 2})
    return toy_spec(rounds, method=method)


def pause_of(peer: SimulatedPeer) -> Pause:
    training = peer.peer.training
    assert training is not None
    assert training.rounds is not None
    return training.rounds.pause


async def paused(swarm: SimulatedSwarm, name: str) -> SimulatedPeer:
    peer = swarm[name]
    pause_of(peer).begin()
    await swarm.until(lambda: peer.facts.state is PeerState.PAUSED)
    return peer


def is_at(peer: SimulatedPeer, step: int):
    return lambda: peer.facts.step >= step


@WAYS
@simulated()
async def test_nobody_waits_for_a_paused_peer_and_it_comes_back(tmp_path, method):
    async with open_swarm(1, spec_of(method), tmp_path) as swarm:
        await start(swarm, *"abc")
        await swarm.until(is_at(swarm["c"], 40))
        resting = await paused(swarm, "c")
        weights, step = resting.slow_weights(), resting.facts.step
        others = [swarm["a"], swarm["b"]]
        opened = [len(peer.events(EventName.ROUND_OPENED)) for peer in others]
        await swarm.until(is_at(swarm["a"], step + 80))
        assert np.array_equal(resting.slow_weights(), weights)
        assert resting.facts.step == step
        for peer, before in zip(others, opened, strict=True):
            known = peer.view.members_training(trio.current_time())
            assert [member.peer_id for member in known] != [resting.peer_id]
            rounds = peer.events(EventName.ROUND_CLOSED)[before:]
            assert max(event["seconds"] for event in rounds) < LONGEST_ROUND_S
        assert swarm["a"].status().peers
        pause_of(resting).end()
        await swarm.until(is_at(resting, step + 80))
        await swarm.finished()
        assert [peer.failure for peer in swarm.peers.values()] == [None] * 3
        (told,) = resting.events(EventName.TRAINING_RESUMED)
        assert told["seconds"] > 6
        for peer in others:
            assert distance(peer, resting) < 0.02


def one_peer(state: PeerState) -> Pause:
    """What a peer in this state lets its user do."""
    facts = Facts("me", 1, state=state)
    events = EventLog(lambda _: None, peer="me", wall_time_s=lambda: 0.0)
    services: Any = SimpleNamespace(facts=facts, events=events)
    return Pause(services, EMPTY, DataPlan(1, 100))


EMPTY = View(Roster(10.0), "group")


def test_wrong_use_is_answered() -> None:
    pause = one_peer(PeerState.TRAINING)
    with pytest.raises(PauseRefused, match="is not paused"):
        pause.end()
    pause.begin()
    with pytest.raises(PauseRefused, match="is about to pause already"):
        pause.begin()
    pause.end()
    pause.begin()
    with pytest.raises(PauseRefused, match="no rounds now, it is finished"):
        one_peer(PeerState.FINISHED).begin()


async def test_strangers_do_not_say_where_in_the_data_it_goes_on(autojump_clock):
    pause, roster = one_peer(PeerState.TRAINING), Roster(10.0)
    view: Any = SimpleNamespace(alive=roster.alive, members_training=roster.alive)
    pause._view, facts = view, pause._facts
    facts.spec, facts.position = AmendedSpec(toy_spec()), 30
    pause.begin()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pause.rest, trio.lowlevel.checkpoint)
        for _ in range(int(TRUSTED_AFTER_S) + 1):
            for peer_id in "ab":
                told = Progress("training", epoch=0, position=70)
                roster.heartbeat(trio.current_time(), peer_id, 1, told)
            await trio.sleep(1.0)
        for number in range(5):
            told = Progress("training", epoch=0, position=99)
            roster.heartbeat(trio.current_time(), f"stranger {number}", 1, told)
        pause.end()
    assert facts.position == 70


@simulated()
async def test_a_peer_that_rested_too_long_joins_again(tmp_path):
    async with open_swarm(1, spec_of("noloco", 40), tmp_path) as swarm:
        await start(swarm, *"ab")
        resting = await paused(swarm, "b")
        lost = resting.facts.step + (LOST_LAG_ROUNDS + 1) * 20
        await swarm.until(is_at(swarm["a"], lost))
        pause_of(resting).end()
        await resting.ended.wait()
        assert isinstance(resting.failure, JoinAgain)
        assert "far behind" in str(resting.failure)


@WAYS
@simulated()
async def test_a_run_that_ended_meanwhile_is_joined_again(tmp_path, method):
    async with open_swarm(1, spec_of(method, 4), tmp_path) as swarm:
        await start(swarm, *"abc")
        resting = await paused(swarm, "c")
        await swarm.finished("a", "b")
        assert not set(skips(swarm["a"])) - {"no_partner"}
        pause_of(resting).end()
        await resting.ended.wait()
        assert isinstance(resting.failure, JoinAgain)


@simulated()
async def test_a_paused_peer_gives_its_state_to_joiners(tmp_path):
    async with open_swarm(1, spec_of("noloco"), tmp_path) as swarm:
        await start(swarm, "a")
        await swarm.until(is_at(swarm["a"], 40))
        resting = await paused(swarm, "a")
        joiner = swarm.join("b")
        await swarm.until(lambda: bool(joiner.events(EventName.STATE_RECEIVED)))
        await swarm.until(is_at(joiner, resting.facts.step + 20))
        first = joiner.events(EventName.ROUND_OPENED)[0]
        assert first["step"] == resting.facts.step


@simulated()
async def test_fragments_in_pairs_are_averaged_on_after_a_checkpoint(tmp_path):
    async with open_swarm(1, spec_of("streaming", 8), tmp_path) as swarm:
        await start(swarm, *"ab", machine_of=dict.fromkeys("ab", Machine(checkpoint_every_s=3.0)))
        await swarm.finished()
        for peer in swarm.peers.values():
            written = peer.events(EventName.CHECKPOINT_WRITTEN)
            averaged = peer.events(EventName.ROUND_AVERAGED)
            after = [e for e in averaged if e["monotonic_s"] > written[1]["monotonic_s"]]
            assert len(after) > len(averaged) / 2
