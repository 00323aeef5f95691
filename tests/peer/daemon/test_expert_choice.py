"""Peers that are told no expert: which they take, and when they go over to another."""

import numpy as np
import pytest
from expert_worlds import ANY, STEPS, begin, expert_of, go_over, run_of
from swarm_worlds import simulated, start

from peer.daemon import kept_experts
from peer.facts import PeerState
from peer.observe.event_names import EventName
from peer.state.checkpoints import Checkpoint
from protocol.content.samples import Float32Vector
from protocol.errors import InvalidRunSpec
from protocol.run.assignment import EMPTY_S
from simulation.machine import Machine
from simulation.swarm import SimulatedPeer, SimulatedSwarm, open_swarm

pytestmark = pytest.mark.slow


@simulated()
async def test_newcomers_together_take_the_experts_that_have_most_left_for_their_peers(tmp_path):
    spec = run_of({"general": 60, "code": 90, "math": 30})
    async with open_swarm(1, spec, tmp_path) as swarm:
        await start(swarm, "a", machine_of={"a": ANY})
        await begin(swarm, "b", "c")
        assert {expert_of(swarm[name]) for name in "bc"} == {"code", "math"}
        await begin(swarm, "d")
        assert expert_of(swarm["d"]) == "code", "90 rounds of one peer are more than 60"
        (chosen,) = swarm["d"].events(EventName.EXPERT_CHOSEN)
        assert chosen["expert"] == "code"
        told = lambda: {each.name: each.peers for each in swarm["a"].status().experts}
        await swarm.until(lambda: told() == {"general": 1, "code": 2, "math": 1})
        assert not any(each.stands for each in swarm["a"].status().experts)


@simulated()
async def test_an_expert_that_does_not_fit_is_named_and_another_is_taken(tmp_path):
    spec = run_of({"general": 60, "code": 90})
    async with open_swarm(1, spec, tmp_path) as swarm:
        await start(swarm, "a", machine_of={"a": ANY})
        small = Machine(misfits={1: "it takes up to 9 GB of memory (1 GB are free)"})
        await begin(swarm, "b", machine=small)
        assert expert_of(swarm["b"]) == "general"
        (unfit,) = swarm["b"].events(EventName.EXPERT_UNFIT)
        assert unfit["expert"] == "code"
        assert "9 GB of memory" in unfit["detail"]
        tiny = swarm.join("c", Machine(misfits={0: "it takes 2 GB", 1: "it takes 9 GB"}))
        await swarm.until(tiny.ended.is_set)
        assert isinstance(tiny.failure, InvalidRunSpec)
        assert "no expert" in str(tiny.failure)
        assert "'general': it takes 2 GB; 'code': it takes 9 GB" in str(tiny.failure)


@simulated()
async def test_one_goes_over_to_an_expert_whose_last_peer_died_and_goes_on_when_it_was_there(
    tmp_path,
):
    spec = run_of({"general": 400, "code": 400})
    async with open_swarm(2, spec, tmp_path) as swarm:
        await start(swarm, "a", machine_of={"a": ANY})
        await begin(swarm, "b")
        assert expert_of(swarm["b"]) == "code"
        await begin(swarm, "c")
        lone, pair = ("b", ("a", "c")) if expert_of(swarm["c"]) == "general" else ("a", ("b", "c"))
        lost, kept = (expert_of(swarm[name]) for name in (lone, pair[0]))
        await swarm.until(lambda: swarm[lone].facts.round >= 5)
        swarm.kill(lone)
        await swarm.until(lambda: any(swarm[name].ended.is_set() for name in pair))
        mover, stayer = pair if swarm[pair[0]].ended.is_set() else pair[::-1]
        (stands,) = swarm[stayer].events(EventName.EXPERT_STANDS)
        assert stands["expert"] == lost
        assert stands["step"] > 0
        (told,) = (each for each in swarm[stayer].status().experts if each.name == lost)
        assert told.stands
        assert told.step == stands["step"]
        moved = await go_over(swarm, mover)
        assert expert_of(moved) == lost
        assert not moved.events(EventName.RUN_RESUMED), "it has no checkpoint of that expert"
        await swarm.until(lambda: moved.facts.round >= 5)
        assert not any(each.stands for each in swarm[stayer].status().experts)
        swarm.kill(stayer)
        await begin(swarm, "e", through=mover)
        assert expert_of(swarm["e"]) == kept, "a newcomer takes what nobody trains"


async def trains_code_then_general(swarm: SimulatedSwarm) -> SimulatedPeer:
    """One trains the generalist; the other has a checkpoint of the code's expert, and joins it."""
    await start(swarm, "a", machine_of={"a": Machine(expert="general")})
    await begin(swarm, "b")
    await swarm.until(lambda: swarm["b"].facts.round >= 5)
    swarm.kill("b")
    await swarm.until(swarm["b"].ended.is_set)
    swarm["b"].facts.expert = "general"
    other = swarm.resume("b")
    await swarm.until(other.ready.is_set)
    return other


@pytest.mark.long
@simulated()
async def test_where_one_comes_back_to_an_expert_it_goes_on_from_its_checkpoint(tmp_path):
    spec = run_of({"general": 400, "code": 400})
    async with open_swarm(2, spec, tmp_path) as swarm:
        other = await trains_code_then_general(swarm)
        assert expert_of(other) == "general"
        assert other.events(EventName.STATE_RECEIVED)
        await swarm.until(other.ended.is_set)
        again = await go_over(swarm, "b")
        assert expert_of(again) == "code"
        (resumed,) = again.events(EventName.RUN_RESUMED)
        assert resumed["step"] > 0


@pytest.mark.long
@simulated()
async def test_moves_take_time_and_pinned_peers_make_none(tmp_path):
    spec = run_of({"general": 400, "code": 400})
    pinned = Machine(expert="general")
    async with open_swarm(3, spec, tmp_path) as swarm:
        await start(swarm, "a", "b", machine_of={"a": pinned, "b": pinned})
        began_s = swarm["a"].facts.training_since_s
        assert began_s is not None
        await swarm.until(lambda: swarm["a"].facts.round >= 60)
        assert not swarm["a"].ended.is_set()
        assert not swarm["b"].ended.is_set()
        assert swarm["a"].facts.training_since_s == began_s
        assert 60 * STEPS * 0.1 > 3 * EMPTY_S


@pytest.mark.long
@simulated()
async def test_when_an_expert_is_trained_its_peers_go_on_with_others_and_one_serves_it(tmp_path):
    spec = run_of({"general": 400, "code": 40, "math": 60})
    small = Machine(checkpoint_every_s=5.0, misfits={0: "it is large"})
    async with open_swarm(4, spec, tmp_path) as swarm:
        await start(swarm, "a", machine_of={"a": Machine(expert="general")})
        for name, expert in zip("bcde", ("math", "code", "math", "code"), strict=True):
            await begin(swarm, name, machine=small)
            assert expert_of(swarm[name]) == expert
        await swarm.until(lambda: any(swarm[name].ended.is_set() for name in "ce"))
        mover, keeper = ("c", "e") if swarm["c"].ended.is_set() else ("e", "c")
        assert swarm[mover].facts.run_over
        assert expert_of(await go_over(swarm, mover)) == "math"
        await swarm.finished("b", "d", mover)
        assert not swarm[keeper].ended.is_set(), "it serves the model"
        assert swarm[keeper].facts.state is PeerState.FINISHED
        told = {each.name: each for each in swarm["a"].status().experts}
        assert told["code"].step == 40 * STEPS
        assert told["math"].step == 60 * STEPS
        assert not any(each.stands for each in told.values())


@pytest.mark.parametrize("lies", [False, True])
@simulated()
async def test_a_newcomer_goes_on_from_what_another_peer_has_kept_if_it_is_any_good(
    tmp_path, lies, monkeypatch
):
    def random_values(checkpoint: Checkpoint) -> tuple[Float32Vector, Float32Vector]:
        size = checkpoint.manifest.padded_parameters
        return np.full(size, 99.0, np.float32), np.zeros(size, np.float32)

    spec = run_of({"general": 400, "code": 400})
    async with open_swarm(2, spec, tmp_path) as swarm:
        other = await trains_code_then_general(swarm)
        if lies:
            monkeypatch.setattr(kept_experts, "vectors_of", random_values)
        await begin(swarm, "d")
        assert expert_of(swarm["d"]) == "code"
        (begun,) = swarm["d"].events(EventName.EXPERT_BEGUN)
        if lies:
            assert begun["weights"] == "first"
            return
        assert begun["weights"] == "kept"
        assert other.peer_id[-8:] in begun["detail"]
        (opened, *_) = swarm["d"].events(EventName.ROUND_OPENED)
        assert opened["step"] > 2 * STEPS, "it goes on where that stood"
