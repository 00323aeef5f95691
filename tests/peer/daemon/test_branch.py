"""All train the generalist until the branch, and then the experts, by one placing of all."""

from typing import Final

import numpy as np
import pytest
from expert_worlds import ANY, STEPS, begin, expert_of, go_over, run_of
from swarm_worlds import simulated, start

from peer.observe.event_names import EventName
from peer.process.rejoin import JoinAgain
from simulation.machine import Machine
from simulation.swarm import SimulatedSwarm, open_swarm

pytestmark = pytest.mark.slow

ROUND: Final = 6
"""Of the branch."""
NAMES: Final = ("a", "b", "c", "d")


async def after_the_branch(swarm: SimulatedSwarm) -> dict[str, str | None]:
    """The expert of each peer, when all that go over have done so."""
    await swarm.until(lambda: sum(swarm[name].ended.is_set() for name in NAMES) >= 3)
    moved = [name for name in NAMES if swarm[name].ended.is_set()]
    for name in moved:
        assert isinstance(swarm[name].failure, JoinAgain)
        swarm.resume(name)
    await swarm.until(lambda: all(swarm[name].ready.is_set() for name in moved))
    return {name: expert_of(swarm[name]) for name in NAMES}


@pytest.mark.long
@pytest.mark.parametrize(
    "sync",
    [{}, {"method": "diloco"}, {"noloco": {"fragments": "strided", "blocks_per_fragment": 1}}],
    ids=["pairs", "diloco", "fragments in pairs"],
)
@simulated()
async def test_peers_part_at_the_branch_and_begin_with_the_generalists_weights(tmp_path, sync):
    branch = 4 * ROUND  # four peers go through a round's steps together
    spec = run_of({"general": 160, "code": 160, "math": 80}, branch_round=branch, **sync)
    async with open_swarm(1, spec, tmp_path) as swarm:
        await start(swarm, *NAMES, machine_of=dict.fromkeys(NAMES, ANY))
        assert {expert_of(swarm[name]) for name in NAMES} == {"general"}, "all train it"
        assert not any(each.stands for each in swarm["a"].status().experts)
        before = {name: swarm[name] for name in NAMES}
        went = await after_the_branch(swarm)
        assert sorted(map(str, went.values())) == ["code", "code", "general", "math"]
        for name, expert in went.items():
            if expert == "general":
                assert swarm[name] is before[name], "who stays trains on"
                continue
            last = before[name].events(EventName.ROUND_CLOSED)[-1]
            assert last["step"] >= (branch - 1) * STEPS, "one may leave within a round"
            begun = swarm[name].events(EventName.EXPERT_BEGUN)
            for event in begun:
                assert event["expert"] == expert
                assert event["weights"] == "generalist's"
                assert "our checkpoint of step" in event["detail"]
            assert begun or swarm[name].events(EventName.STATE_RECEIVED)
        assert any(swarm[name].events(EventName.EXPERT_BEGUN) for name in NAMES)
        await swarm.finished(*[name for name in NAMES if went[name] == "math"])


@simulated()
async def test_who_has_no_checkpoint_takes_the_generalists_weights_from_its_peers(tmp_path):
    spec = run_of({"general": 40, "code": 40}, branch_round=ROUND)
    async with open_swarm(2, spec, tmp_path) as swarm:
        pinned = Machine(expert="general")
        await start(swarm, "a", "b", machine_of={"a": pinned, "b": pinned})
        await swarm.until(lambda: swarm["a"].facts.step > ROUND * STEPS)
        assert not swarm["a"].ended.is_set()
        await begin(swarm, "c")
        assert expert_of(swarm["c"]) == "code"
        (begun,) = swarm["c"].events(EventName.EXPERT_BEGUN)
        assert begun["weights"] == "generalist's"
        assert "of step" in begun["detail"]
        apart = np.linalg.norm(swarm["c"].slow_weights() - swarm["a"].slow_weights())
        assert apart < np.linalg.norm(swarm["a"].slow_weights()) / 2


@simulated()
async def test_who_is_pinned_trains_the_generalist_first_and_then_its_own(tmp_path):
    spec = run_of({"general": 40, "code": 40}, branch_round=ROUND)
    async with open_swarm(3, spec, tmp_path) as swarm:
        machine_of = {"a": Machine(expert="general"), "b": Machine(expert="code")}
        await start(swarm, "a", "b", machine_of=machine_of)
        assert expert_of(swarm["b"]) == "general"
        await swarm.until(swarm["b"].ended.is_set)
        swarm["b"].failure = None  # it was killed before it went over
        again = swarm.resume("b")
        await swarm.until(again.ready.is_set)
        assert expert_of(again) == "general"
        back = await go_over(swarm, "b")
        assert expert_of(back) == "code"
        await swarm.until(lambda: swarm["b"].facts.round >= 3)
        swarm.kill("b")
        await swarm.until(swarm["b"].ended.is_set)
        back = swarm.resume("b")
        await swarm.until(back.ready.is_set)
        assert expert_of(back) == "code"
