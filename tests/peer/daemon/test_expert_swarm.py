"""A run with experts: one roster, and averages inside each expert alone."""

from typing import Any, Final

import pytest
from swarm_worlds import outcomes, partners, simulated, start, toy_spec

from peer.daemon.entry import first_expert
from peer.facts import PeerState
from peer.observe.event_names import EventName
from protocol.errors import InvalidRunSpec
from protocol.membership.group import Group
from protocol.outcomes import RefusalReason
from protocol.run.run_spec import RunSpec, validated
from simulation.machine import Machine
from simulation.swarm import SimulatedSwarm, open_swarm

pytestmark = pytest.mark.slow

ROUNDS: Final = 6
STEPS: Final = 20
PAIRS: Final = (("a", "c"), ("b", "d"))


def experts_spec(rounds: int = ROUNDS, *, code_rounds: int = ROUNDS, **sync: Any) -> RunSpec:
    tree = toy_spec(rounds, STEPS, **sync).model_dump()
    code = {
        "name": "code",
        "source": "text:code/*.txt",
        "model": {"num_layers": 2},
        "training": {"total_steps": code_rounds * STEPS},
    }
    more = {"experts": [{"name": "general"}, code], "ensemble": {"branch_round": 0}}
    return validated({**tree, **more})


def machine_of(expert: str) -> Machine:
    return Machine(expert=expert, checkpoint_every_s=5.0)


MACHINES: Final = {
    name: machine_of(expert)
    for names, expert in zip(PAIRS, ("general", "code"), strict=True)
    for name in names
}


async def start_all(swarm: SimulatedSwarm) -> None:
    await start(swarm, *MACHINES, machine_of=MACHINES)


def test_a_founder_begins_with_the_generalist():
    spec = experts_spec()
    assert first_expert(spec) == "general"
    assert first_expert(toy_spec()) is None
    with pytest.raises(InvalidRunSpec, match=r"\(general, code\): say which with --expert NAME"):
        spec.expert_named(None)


@simulated()
async def test_each_pair_averages_inside_its_expert_alone_and_ends_by_its_own_schedule(tmp_path):
    async with open_swarm(1, experts_spec(code_rounds=4), tmp_path) as swarm:
        await start_all(swarm)
        await swarm.finished()
        for number, names in enumerate(PAIRS):
            for name, other in (names, names[::-1]):
                peer = swarm[name]
                assert set(partners(peer).values()) == {swarm[other].peer_id}
                assert outcomes(peer).count("averaged") >= 3
                status = peer.status()
                assert status.state is PeerState.FINISHED
                assert status.part == f"expert/{number}"
                assert status.expert == ("general", "code")[number]
                assert status.total_steps == (ROUNDS, 4)[number] * STEPS
                assert len(status.peers) == 3, "one roster"
                assert not peer.facts.refused[RefusalReason.OTHER_GROUP]
                run_id = peer.facts.run_id
                assert run_id == swarm["a"].facts.run_id
                assert run_id is not None
                assert peer.facts.group == Group(run_id, f"expert/{number}").digest


@pytest.mark.parametrize(
    "sync",
    [{"method": "diloco"}, {"noloco": {"fragments": "strided", "blocks_per_fragment": 1}}],
    ids=["diloco", "fragments in pairs"],
)
def test_the_other_ways_average_inside_an_expert_too(tmp_path, sync):
    @simulated()
    async def run() -> None:
        async with open_swarm(1, experts_spec(code_rounds=4, **sync), tmp_path) as swarm:
            await start_all(swarm)
            await swarm.finished()
            for name in MACHINES:
                assert swarm[name].status().outcomes.averaged >= 3
                assert not swarm[name].facts.refused[RefusalReason.OTHER_GROUP]

    run()


@simulated()
async def test_an_expert_whose_last_peer_died_comes_back_from_its_checkpoint(tmp_path):
    spec = experts_spec(40, code_rounds=40)
    async with open_swarm(2, spec, tmp_path) as swarm:
        await start_all(swarm)
        for name in ("d", "b"):
            await swarm.until(lambda: swarm["b"].facts.round >= 5)
            swarm.kill(name)
            await swarm.until(swarm[name].ended.is_set)
        general = swarm["a"].facts.step
        await swarm.until(lambda: swarm["a"].facts.step >= general + 3 * STEPS)
        back = swarm.resume("b")
        await swarm.until(back.ready.is_set)
        (resumed,) = back.events(EventName.RUN_RESUMED)
        assert resumed["step"] > 0
        assert back.facts.expert == "code"
        assert not back.events(EventName.STATE_RECEIVED), "nobody else has that expert"
        again = swarm.resume("d")
        await swarm.until(lambda: swarm["b"].facts.round >= resumed["round"] + 6)
        assert "averaged" in outcomes(again)
        assert set(partners(again).values()) == {back.peer_id}


@simulated()
async def test_a_newcomer_takes_an_expert_that_nobody_has_begun(tmp_path):
    async with open_swarm(3, experts_spec(), tmp_path) as swarm:
        await start(swarm, "a", machine_of=MACHINES)
        swarm.join("b", MACHINES["b"])
        await swarm.until(swarm["b"].ready.is_set)
        assert not swarm["b"].events(EventName.STATE_RECEIVED)
        swarm.join("d", MACHINES["d"])
        await swarm.until(swarm["d"].ready.is_set)
        (received,) = swarm["d"].events(EventName.STATE_RECEIVED)
        assert received["remotes"] == [swarm["b"].peer_id]


@simulated()
async def test_a_name_that_no_expert_has_ends_a_joiner_with_the_nearest_one(tmp_path):
    async with open_swarm(4, experts_spec(), tmp_path) as swarm:
        await start(swarm, "a", machine_of=MACHINES)
        stranger = swarm.join("x", machine_of("cod"))
        await swarm.until(stranger.ended.is_set)
        assert isinstance(stranger.failure, InvalidRunSpec)
        assert "no expert 'cod', but general, code; did you mean 'code'?" in str(stranger.failure)


@simulated()
async def test_who_begins_an_expert_anew_says_so(tmp_path):
    async with open_swarm(5, experts_spec(40, code_rounds=40), tmp_path) as swarm:
        await start(swarm, "a", "b", machine_of=MACHINES)
        assert [e["weights"] for e in swarm["b"].events(EventName.EXPERT_BEGUN)] == ["first"]
        await swarm.until(lambda: swarm["b"].facts.round >= 2)
        swarm.kill("b")
        await swarm.until(swarm["b"].ended.is_set)
        late = swarm.join("d", MACHINES["d"])
        await swarm.until(late.ready.is_set)
        (begun,) = late.events(EventName.EXPERT_BEGUN)
        assert (begun["expert"], begun["weights"]) == ("code", "first")
