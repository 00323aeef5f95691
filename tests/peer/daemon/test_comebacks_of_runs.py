"""All machines of a run go down at once: it goes on from the newest checkpoints, whoever is back.

Real daemon parts on simulated ports; a home is a folder that outlives its peer.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio.testing
from swarm_worlds import simulated, start, toy_spec

from peer.facts import PeerState
from peer.observe.event_names import EventName
from peer.process.rejoin import JoinAgain
from peer.runtime.files import replace_file
from peer.state import checkpoints as checkpoints_module
from protocol.address.multiaddr import split_peer_id
from protocol.membership.returning import LISTEN_S
from protocol.schedule.rounds import LOST_LAG_ROUNDS
from simulation.machine import Machine
from simulation.swarm import SimulatedPeer, SimulatedSwarm, open_swarm

pytestmark = pytest.mark.slow

EVERY_S = 5.0
KEEPS = Machine(checkpoint_every_s=EVERY_S)
ROUNDS = 40
WAYS = pytest.mark.parametrize(
    "method",
    [
        "noloco",
        pytest.param("diloco", marks=pytest.mark.long),
        pytest.param("streaming", marks=pytest.mark.long),
    ],
)


async def train_a_while(swarm: SimulatedSwarm, *names: str, seconds: float = 12.0) -> None:
    await start(swarm, *names, machine_of=dict.fromkeys(names, KEEPS))
    written = lambda: all(swarm[n].events(EventName.CHECKPOINT_WRITTEN) for n in names)
    await swarm.until(written)


async def kill_all(swarm: SimulatedSwarm) -> dict[str, int]:
    """Everybody's step at the end."""
    steps = {name: peer.facts.step for name, peer in swarm.peers.items()}
    for name in steps:
        swarm.kill(name)
    for peer in swarm.peers.values():
        await peer.ended.wait()
    return steps


def checkpoint_steps(folder: Path) -> list[int]:
    manifests = sorted(folder.glob("checkpoints/*/manifest.json"))
    return [int(json.loads(path.read_text())["step"]) for path in manifests]


def is_training(*peers: SimulatedPeer) -> Callable[[], bool]:
    return lambda: all(
        peer.ready.is_set() and peer.facts.state is PeerState.TRAINING for peer in peers
    )


def averaged_again(*peers: SimulatedPeer, times: int = 3) -> Callable[[], bool]:
    """Whether each of them has averaged so many times from now on."""
    before = [peer.facts.averaged for peer in peers]
    return lambda: all(p.facts.averaged >= b + times for p, b in zip(peers, before, strict=True))


def one(peer: SimulatedPeer, name: EventName) -> Any:
    (event,) = peer.events(name)
    return event


@WAYS
@simulated()
async def test_averaging_goes_on_after_checkpoints(tmp_path, method):
    async with open_swarm(1, toy_spec(ROUNDS, method=method), tmp_path) as swarm:
        await train_a_while(swarm, *"abc")
        await swarm.until(averaged_again(*(swarm[name] for name in "abc"), times=6))


@WAYS
@simulated()
async def test_a_run_whose_peers_were_all_killed_goes_on_from_the_newest_checkpoint(
    tmp_path, method
):
    async with open_swarm(1, toy_spec(ROUNDS, method=method), tmp_path) as swarm:
        await train_a_while(swarm, *"abc")
        before = await kill_all(swarm)
        newest = {name: checkpoint_steps(tmp_path / name)[-1] for name in "abc"}
        back = [swarm.resume(name) for name in "abc"]
        await swarm.until(is_training(*back))
        leaders = [peer for peer in back if peer.events(EventName.RUN_RESUMED)]
        assert len(leaders) == 1
        resumed = one(leaders[0], EventName.RUN_RESUMED)
        assert resumed["step"] == max(newest.values())
        assert resumed["step"] > max(before.values()) - 3 * EVERY_S / 0.1
        assert resumed["tokens"] > 0
        for peer in back:
            if peer is not leaders[0]:
                assert peer.events(EventName.STATE_RECEIVED)
        await swarm.finished()
        assert all(peer.failure is None for peer in back)
        assert all(peer.facts.averaged for peer in back)


@simulated()
async def test_the_founders_home_may_be_lost(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await train_a_while(swarm, *"abc")
        await kill_all(swarm)
        shutil.rmtree(tmp_path / "a")
        back = [swarm.resume(name) for name in "bc"]
        await swarm.until(is_training(*back))
        assert sum(len(peer.events(EventName.RUN_RESUMED)) for peer in back) == 1
        newcomer = swarm.join("d", through=["b"])
        await swarm.until(is_training(newcomer))
        assert newcomer.facts.step > 0


@simulated()
async def test_one_comes_back_alone_and_the_others_later_follow_it(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await train_a_while(swarm, *"abc")
        await kill_all(swarm)
        first = swarm.resume("b")
        await swarm.until(is_training(first))
        others = [swarm.resume(name) for name in "ac"]
        await swarm.until(is_training(*others))
        for peer in others:
            assert not peer.events(EventName.RUN_RESUMED)
            assert peer.events(EventName.STATE_RECEIVED)


def far_ahead(peer: SimulatedPeer, step: int) -> Callable[[], bool]:
    """Whether it is so far beyond that step that one which is there would be lost."""
    lag = (2 * LOST_LAG_ROUNDS + 20) * toy_spec(1).sync.round_steps
    return lambda: peer.facts.step > step + lag


@WAYS
@simulated()
async def test_the_newest_checkpoint_is_gone_on_from_though_an_old_one_is_back_first(
    tmp_path, method
):
    async with open_swarm(1, toy_spec(10 * ROUNDS, method=method), tmp_path) as swarm:
        await train_a_while(swarm, *"ab")
        swarm.kill("a")
        await swarm["a"].ended.wait()
        await swarm.until(far_ahead(swarm["b"], swarm["a"].facts.step))
        await kill_all(swarm)
        oldest, newest = (checkpoint_steps(tmp_path / name)[-1] for name in "ab")
        first = swarm.resume("a")
        await swarm.until(is_training(first))
        assert one(first, EventName.RUN_RESUMED)["step"] == oldest
        late = swarm.resume("b")
        await swarm.until(is_training(late))
        assert one(late, EventName.RUN_RESUMED)["step"] == newest
        await swarm.until(first.ended.is_set)
        assert isinstance(first.failure, JoinAgain)
        [*_, last] = first.events(EventName.CHECKPOINT_WRITTEN)
        assert last["step"] < newest, "it says which weights it has, not where the other is"
        again = swarm.resume("a")
        await swarm.until(is_training(again))
        assert again.events(EventName.STATE_RECEIVED)
        await swarm.until(averaged_again(again, late))
        assert min(again.facts.step, late.facts.step) >= newest


@simulated()
async def test_a_newer_checkpoint_is_set_aside_where_others_train_from_an_older_one(tmp_path):
    async with open_swarm(1, toy_spec(10 * ROUNDS), tmp_path) as swarm:
        await train_a_while(swarm, *"abc")
        for name in "ab":
            swarm.kill(name)
            await swarm[name].ended.wait()
        await swarm.until(far_ahead(swarm["c"], swarm["a"].facts.step))
        await kill_all(swarm)
        newest = checkpoint_steps(tmp_path / "c")[-1]
        first = [swarm.resume(name) for name in "ab"]
        await swarm.until(is_training(*first))
        late = swarm.resume("c")
        await swarm.until(is_training(late))
        assert not late.events(EventName.RUN_RESUMED)
        aside = one(late, EventName.CHECKPOINT_SET_ASIDE)
        assert aside["step"] == newest
        assert aside["followed_step"] < newest
        await swarm.until(lambda: len(late.events(EventName.CHECKPOINT_WRITTEN)) > 4)
        assert (Path(aside["path"]) / "manifest.json").exists()


@simulated()
async def test_a_peer_that_comes_back_to_a_living_run_takes_its_state_at_once(tmp_path):
    """And has trained what it had trained before: `tokens` does not begin anew."""
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await train_a_while(swarm, *"abc")
        swarm.kill("c")
        await swarm["c"].ended.wait()
        back = swarm.resume("c")
        manifest = max((tmp_path / "c").glob("checkpoints/*/manifest.json"))
        earlier = json.loads(manifest.read_text())["tokens"]
        await swarm.until(is_training(back))
        assert not back.events(EventName.RUN_RESUMED)
        came, received = one(back, EventName.DAEMON_STARTED), one(back, EventName.STATE_RECEIVED)
        assert received["monotonic_s"] - came["monotonic_s"] < LISTEN_S
        assert back.status().tokens == earlier + back.facts.tokens > 0


@WAYS
@simulated()
async def test_a_newcomer_joins_through_the_bootstrap_peer_that_was_started_again(tmp_path, method):
    """Behaviour of a run whose only address in the world's hands is that of its founder."""
    async with open_swarm(1, toy_spec(10 * ROUNDS, method=method), tmp_path) as swarm:
        await train_a_while(swarm, *"abc")
        (address,) = swarm["a"].network.addresses
        swarm.kill("a")
        await swarm["a"].ended.wait()
        others = [swarm[name] for name in "bc"]
        await swarm.until(averaged_again(*others))
        again = swarm.resume("a")
        await trio.testing.wait_all_tasks_blocked()
        again.network.move(split_peer_id(address)[0])  # its machine has kept its address
        await swarm.until(is_training(again))
        assert again.events(EventName.STATE_RECEIVED)
        newcomer = swarm.join("d", through=["a"])
        await swarm.until(is_training(newcomer))
        assert newcomer.events(EventName.PEER_LINKED)[0]["remote"] == again.peer_id
        assert again.network.addresses == (address,)
        everybody = [*others, again, newcomer]
        await swarm.until(averaged_again(*everybody))
        assert {str(peer.facts.run_id) for peer in everybody} == {str(others[0].facts.run_id)}
        assert all(peer.failure is None for peer in everybody)


@simulated()
async def test_a_torn_newest_checkpoint_is_told_and_the_one_before_is_used(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await start(swarm, "a", machine_of={"a": KEEPS})
        alone = swarm["a"]
        await swarm.until(lambda: len(alone.events(EventName.CHECKPOINT_WRITTEN)) == 2)
        await kill_all(swarm)
        *_, before, newest = sorted((tmp_path / "a" / "checkpoints").iterdir())
        with (newest / "trainer.safetensors").open("r+b") as file:
            file.truncate(100)
        back = swarm.resume("a")
        await swarm.until(is_training(back))
        assert one(back, EventName.CHECKPOINT_REFUSED)["path"] == str(newest)
        assert one(back, EventName.RUN_RESUMED)["path"] == str(before)


@simulated()
async def test_a_full_disk_costs_a_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    full = [True]

    def replace(path: Path, data: bytes) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        replace_file(path, data)

    monkeypatch.setattr(checkpoints_module, "replace_file", replace)
    async with open_swarm(1, toy_spec(ROUNDS * 10), tmp_path) as swarm:
        await start(swarm, "a", machine_of={"a": KEEPS})
        peer = swarm["a"]
        await swarm.until(lambda: len(peer.events(EventName.CHECKPOINT_FAILED)) == 2)
        assert "No space left" in peer.events(EventName.CHECKPOINT_FAILED)[0]["detail"]
        assert list((tmp_path / "a" / "checkpoints").iterdir()) == []
        full[0], step = False, peer.facts.step
        await swarm.until(lambda: bool(peer.events(EventName.CHECKPOINT_WRITTEN)))
        assert peer.facts.step > step
        assert peer.facts.checkpoints == {"failed": 2, "written": 1}


@simulated()
async def test_a_peer_that_leaves_writes_a_last_checkpoint(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await start(swarm, "a", machine_of={"a": Machine(checkpoint_every_s=0.0)})
        peer = swarm["a"]
        await swarm.until(lambda: peer.facts.step > 30)
        step = peer.facts.step
        peer.peer.request_stop()
        await peer.ended.wait()
        written = one(peer, EventName.CHECKPOINT_WRITTEN)
        assert written["step"] >= step
        weights = peer.slow_weights()
        back = swarm.resume("a")
        await swarm.until(lambda: bool(back.events(EventName.ROUND_OPENED)))
        assert back.events(EventName.ROUND_OPENED)[0]["step"] >= written["step"]
        assert np.array_equal(back.slow_weights(), weights)


@simulated()
async def test_a_run_that_was_over_is_over_when_its_peers_are_back(tmp_path):
    async with open_swarm(1, toy_spec(4), tmp_path) as swarm:
        await start(swarm, *"ab", machine_of=dict.fromkeys("ab", KEEPS))
        await swarm.finished()
        weights = swarm["a"].slow_weights()
        await kill_all(swarm)
        back = [swarm.resume(name) for name in "ab"]
        await swarm.finished()
        assert [peer.facts.state for peer in back] == [PeerState.FINISHED] * 2
        assert np.array_equal(back[0].slow_weights(), weights)
